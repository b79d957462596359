"""Run folders that were damaged, and every command on them."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.hostile.cases import CaseCounts, agentrl, attempt, contents
from benchmarks.hostile.recipes import TINY

Damage = Callable[[Path, random.Random], object]


def _flip(path: Path, rng: random.Random, *, count: int) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(count if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(1, max(2, len(data)))])


def _shuffle(path: Path, rng: random.Random) -> None:
    """Put the lines into another order, and one of them in twice."""
    lines = path.read_bytes().split(b"\n")
    rng.shuffle(lines)
    path.write_bytes(b"\n".join([*lines, *lines[:1]]))


def _other_values(path: Path, rng: random.Random) -> None:
    """Put other values in the place of some of a JSON file's own: null, text, a list, a number that is huge or none."""
    try:
        rows: list[Any] = [json.loads(line) for line in path.read_bytes().splitlines()]
    except ValueError:
        return _flip(path, rng, count=64)
    for _ in range(2):
        at: Any = rows
        while isinstance(at, dict | list) and at:
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            if not (isinstance(at[key], dict | list) and at[key]) or rng.random() < 0.25:
                at[key] = rng.choice([None, "text", [], {}, -1, 99, 10**30, 1e308, 1e999, [[]], {"kind": "x"}])
                break
            at = at[key]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return None


def _write(path: Path, _: random.Random, *, data: bytes) -> None:
    path.write_bytes(data)


def _append(path: Path, _: random.Random, *, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def _delete(path: Path, _: random.Random) -> None:
    path.unlink()


def _folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGES: dict[str, Damage] = {
    "cut": _cut,
    "emptied": partial(_write, data=b""),
    "deleted": _delete,
    "one bit": partial(_flip, count=1),
    "64 bits": partial(_flip, count=64),
    "other values": _other_values,
    "[]": partial(_write, data=b"[]\n"),
    "null": partial(_write, data=b"null\n"),
    "{}": partial(_write, data=b"{}\n"),
    "3": partial(_write, data=b"3\n"),
    "nested": partial(_write, data=b"[" * 3000 + b"]" * 3000 + b"\n"),
    "noise": partial(_write, data=bytes(range(256)) * 4),
    "zeros": partial(_write, data=b"\0" * 4096),
    "a list at the end": partial(_append, data=b"[1]\n"),
    "noise at the end": partial(_append, data=b"\xff\xfe\n"),
    "shuffled": _shuffle,
    "a folder": _folder,
    "a link to itself": _loop,
    "a pipe": _pipe,
}
STRAY = (
    "checkpoints/step-000004-backup/agentrl.json", "checkpoints/step-99/agentrl.json", "checkpoints/step-x/agentrl.json",
    "checkpoints/notes.txt", "checkpoints/.step-000009.partial/model.safetensors", "rollouts/step-x.jsonl",
    "rollouts/step-000001 (copy).jsonl", "rollouts/notes.txt", "rollouts/step-000009.jsonl/x", "journal/notes.jsonl",
    "journal/000001-old.jsonl", "journal/notes.txt", "journal/999999.jsonl", "journal/1.jsonl", "tokenizer/chat_template.jinja",
    "tokenizer/added_tokens.json", "reference/x.bin", ".config.yaml.partial", "metrics.jsonl~", "episodes/x", "faults/x.json",
)  # fmt: skip
"""Files that someone left there."""


def whole_run(folder: Path) -> Path:
    """Return the folder of a run that was killed in its fourth step: checkpoints, a journal, rollouts, a KL reference."""
    recipe = {**TINY, "rollout": {**TINY["rollout"], "mode": "partial", "max_live_episodes": 3}}
    recipe |= {"loss": {"unit": "version", "anchor": "behavior", "kl_coefficient": 0.01}}
    recipe["train"] = {**TINY["train"], "steps": 6, "checkpoint_every": 2}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def killed() -> None:
        import os
        import signal

        from agentrl.run import loop
        from agentrl.run.build import Parts

        train_step = loop.train_step

        def or_die(parts: Parts, step: int, **options: Any) -> loop.StepResult:
            if step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(parts, step, **options)

        loop.train_step = or_die
        agentrl("train", folder / "recipe.yaml", "--run_dir", folder / "run")()

    ended = attempt(killed, folder=folder / "killed")
    assert ended.status == -9, ended
    return folder / "run"


def commands(run: Path) -> dict[str, Callable[[], object]]:
    """Return every command that reads a run's folder."""
    return {
        "train": agentrl("train", run, "--train.steps", 4),
        "show": agentrl("show", run, "-n", 3),
        "eval": agentrl("eval", run),
        "export": agentrl("export", run, "exported"),
        "explain": agentrl("credit", "explain", "turn_return", run),
        "doctor": agentrl("doctor", run),
    }


def damages(run: Path) -> Iterator[tuple[str, str, Damage]]:
    """Yield a file of a run, what happens to it, and how."""
    for path in sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock"):
        name = str(path.relative_to(run))
        if "step-000000" not in name:  # nobody reads an older checkpoint
            for words, damage in DAMAGES.items():
                yield name, words, damage
    for name in STRAY:
        for words in ("emptied", "{}", "noise"):
            yield name, f"stray, {words}", DAMAGES[words]


def try_folders(folder: Path, every: int) -> CaseCounts:
    """Run every command on a damaged folder: it works, or is refused in one line and changes nothing."""
    tally = CaseCounts("a command on a run folder of which one file is damaged, missing or too many")
    folder.mkdir(exist_ok=True)
    run = whole_run(folder)
    number = 0
    for count, (name, words, damage) in enumerate(damages(run)):
        for place, command in enumerate(commands(Path())):
            # `train` reads most; the others take turns.
            if (command != "train" and place - 1 != count % 5) or (number := number + 1) % every:
                continue
            here = folder / f"folder-{number}"
            shutil.copytree(run, here / "run", symlinks=True)
            target = here / "run" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            damage(target, random.Random(number))
            before = contents(here / "run")
            ended = attempt(commands(here / "run")[command], folder=here / "cwd")
            wrong = ended.refusal() if ended.status == 2 else ended.harm()
            if not wrong and ended.status == 2 and (changed := before.items() ^ contents(here / "run").items()):
                wrong = f"refused, and changed {', '.join(sorted({file for file, _ in changed}))}"
            if not wrong and ended.status == 2 and any((here / "cwd").iterdir()):
                wrong = "refused, and left something"
            outcome = "refused in one line" if ended.status else "worked"
            tally.add(f"{command}, {name}: {words}", outcome, wrong=wrong)
            shutil.rmtree(here)
    return tally
