"""Commands that documents show: checked by the real parser and the real recipes, and run where that takes a moment."""

import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from agentrl.api.evaluation import to_play_at_endpoint
from agentrl.api.target import find, load
from agentrl.cli import main
from agentrl.cli.commands import make_parser
from agentrl.compare.runner import make_arms, parse_varied
from agentrl.errors import ConfigError
from agentrl.recipe.config import load_recipe
from tests.support.docs import ROOT

QUICK = re.compile(
    r"credit|fields|algorithms|show(?!.*--faults)|report|export(?!.*--(adapter|push|step))|eval(?!.*--endpoint)|"
    r"train runs/|envs$|envs (check|new|replay)"
)
"""Commands that are run."""
_RUN = re.compile(r"runs/(compare/)?\w+-[\w…-]+|\bRUN(_FOLDER|\d)?\b")
_EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
_TARGETS = {
    line.partition(":")[0]
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    if re.match(r"\w+:", line)
}


def commands(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the words of each command of a block, and the comment behind it."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words, line.rpartition("  # ")[2].strip() if "  # " in line else ""


def check(words: list[str], comment: str, *, run: Path) -> None:
    """Check a command, and carry it out where that is quick; `run` is the folder of a run that is there."""
    program, *rest = words
    if program == "make":
        assert rest[0] in _TARGETS, f"there is no `make {rest[0]}`"
    elif program == "python":
        assert Path(rest[0]).is_file() or (ROOT / rest[0]).is_file() or rest[0] == "-m", f"{rest[0]} is not there"
    elif program == "pip":
        for extra in re.findall(r"agentrl\[([\w,-]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= _EXTRAS, f"agentrl has no extra {extra}"
        for file in re.findall(r"requirements[\w-]*\.txt", " ".join(rest)):
            assert (ROOT / file).is_file()
    elif program == "accelerate":
        assert rest[rest.index("-m") + 1] == "agentrl"
        _check_agentrl(rest[rest.index("-m") + 2 :], comment)
    elif program == "agentrl":
        given = [_RUN.sub(str(run), word).replace("train/000012/3", "train/000000/0") for word in rest]
        is_again = [word == str(run) and word in given[:number] for number, word in enumerate(given)]
        _check_agentrl([word for word, again in zip(given, is_again, strict=True) if not again], comment)
    else:
        assert program in ("source", "trackio"), f"{program} is not known here: check it, or say why it is not run"


def _check_agentrl(words: list[str], comment: str) -> None:
    for number, word in enumerate(words):
        if re.fullmatch(r"[\w-]+\.yaml", word) and not Path(word).exists():
            recipe = (ROOT / "examples" / "calculator.yaml").read_text(encoding="utf-8")
            Path(word).write_text(recipe.replace("steps: 240", f"steps: {240 + number}"), encoding="utf-8")
    if comment.startswith("an error: "):
        with pytest.raises(ConfigError) as caught:
            load(Path(words[1]), words[2:])
        assert comment.removeprefix("an error: ") in str(caught.value)
        return
    options, overrides = make_parser().parse_known_args(words)
    assert options.takes_overrides or not overrides, f"agentrl {options.command} does not take {overrides}"
    shown = re.sub(r"\S*/runs/\S+", "runs/x", " ".join(words))
    if QUICK.match(shown):
        with redirect_stdout(io.StringIO()):
            main(words)
    elif options.command in ("compare", "sweep"):
        varied = parse_varied(getattr(options, "vary", None) or getattr(options, "over", []), option="--vary")
        if recipes := [find(target) for target in options.targets if not target.is_dir()]:
            make_arms(recipes, varied=varied, overrides=overrides, folder=Path("runs"), control=False)
    elif options.command == "eval":
        to_play_at_endpoint(options.target, overrides, changes={})
    elif options.command == "env-serve":
        load_recipe(Path(options.env), overrides)
    elif options.command == "envs":
        load_recipe(None, [f"--env.id={options.env}", *overrides])
    elif options.command not in ("chat", "new", "view"):
        load(options.target, overrides)
