"""`agentrl new`: an environment to begin with, its test, and a recipe that trains it, each field with a comment."""

import argparse
import json
import keyword
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from agentrl.cli.commands import Commands
from agentrl.env import ask_oracle, base_env, close_env, describe
from agentrl.errors import ConfigError, UnreachableError
from agentrl.recipe.plugin import section_of
from agentrl.report.terminal import Console
from agentrl.rollout.env_driver import Env, reset, step
from agentrl.rollout.faults import environment_failures
from agentrl.rollout.tasks import Tasks
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.agent.config import AgentConfig
    from agentrl.recipe.config import Recipe

_TEMPLATES = Path(__file__).with_name("templates")


def write_new_env(name: str, folder: Path, *, template: str = "env") -> str:
    """Write an environment, its test and a recipe; return what to do next.

    Args:
        name: of the module.
        folder: to write into.
        template: `env`, a task with a tool; or `dialogue`, with a user.

    Raises:
        ConfigError: for a name that is none of a module, and where a file is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"NAME: {name!r} is no name of a module; use lower-case letters, digits and '_', as in treasure_hunt"
        )
    words = {
        "name": name,
        "cls": "".join(map(str.capitalize, name.split("_"))),
        "title": name.replace("_", " ").capitalize(),
    }
    files = {
        f"{name}.py": f"{template}.py.txt",
        f"test_{name}.py": "test_env.py.txt",
        f"{name}.yaml": f"{template}.yaml.txt",
    }
    if there := [file for file in files if (folder / file).exists()]:
        raise ConfigError(f"NAME: {there[0]} is there already; choose another name")
    for file, source in files.items():
        text = Template((_TEMPLATES / source).read_text(encoding="utf-8")).substitute(words)
        (folder / file).write_text(text, encoding="utf-8")
    env = f"{name}:{words['cls']}"
    return (
        f"Wrote {', '.join(files)}. Now:\n"
        f"  agentrl envs play {env}\n  agentrl envs check {env}\n  agentrl train {name}.yaml"
    )


SCHEMA = "recipe.schema.json"
_TASKS, _MAX_TURNS = 8, 60
_CHARS_A_TOKEN = 2
"""Characters per token of a tokenizer trained on the environment's own dialogues: at least so many, as a rule."""
_AGENT_CHARS = 8000
"""Characters that an agent is taken to add to a task: its prompt, its tools and their results."""

Data = dict[str, Any]


class _Sizes(NamedTuple):
    """Sizes of a few episodes of the environment's oracle."""

    turns: int
    action_chars: int
    """Length of the longest action."""
    chars: int
    """Length of the longest episode, with the schemas of tools."""
    has_oracle: bool
    has_tools: bool


class _Pretrained(NamedTuple):
    """A model that is trained further."""

    name: str
    num_weights: int | None
    """None: the hub that has it cannot be reached."""
    positions: int
    """Longest context that it takes, in tokens."""
    is_adapted: bool
    """Adapters are trained in place of its weights."""

    @property
    def is_small(self) -> bool:
        """Whether it is one of those that learn at higher rates, say little, and train on a CPU."""
        return self.num_weights is not None and self.num_weights < _SMALL_WEIGHTS


_SMALL_WEIGHTS = 1_000_000_000


def new_recipe(
    name: str,
    *,
    played: Data,
    model: str | None,
    overrides: Sequence[str],
    memory_gb: float | None = None,
    gpus: int = 1,
) -> str:
    """Return the text of a recipe that trains at once.

    Args:
        name: of the file, for its first comment.
        played: section `env` with the id of an environment, or section `agent` with the name of a function and its tasks.
        model: a Hugging Face name or folder. None: a small one is made.
        overrides: further fields, as on the command line; they stand in the recipe.
        memory_gb: memory of a GPU that the recipe is to fit, in GB. None: not planned.
        gpus: number of GPUs.

    Raises:
        UserError: for what cannot be made or played, fields that cannot be set, and a model that does not fit.
    """
    from agentrl.recipe.config import load_recipe  # here: it loads torch

    config = load_recipe({**played, "model": {"name_or_path": model}}, _of_played(overrides))
    with environment_failures():
        if config.agent is None:
            made = config.env.make()
            try:
                seen = _look(made)
            finally:
                close_env(made)
        else:
            seen = _look_at_agent(config.agent)
    is_adapted = any(word.startswith("--model.lora") for word in overrides)
    pretrained = None if model is None else _look_at_model(model, is_adapted=is_adapted)
    data: Data = played | (_of_local(seen) if pretrained is None else _of_pretrained(pretrained, seen))
    if config.agent is not None:
        data["rollout"].pop("cut_off", None)  # an agent sees that its answer was cut off, and goes on as it likes
    whole = load_recipe(data, overrides)
    given = [word.partition("=")[0].removeprefix("--") for word in overrides if word.startswith("--")]
    planned = None
    if memory_gb is not None:
        whole, changed, planned = _fitted(whole, pretrained, memory_gb=memory_gb, gpus=gpus, fixed=given)
        given += changed
    recipe = whole.model_dump(mode="json")
    for option in given:
        _set(data, recipe, option.split("."))
    if pretrained is not None and pretrained.num_weights is not None:
        from agentrl.run.build import check_before_loading

        check_before_loading(whole)
    text = "\n".join([*_head(name, seen, pretrained), *([planned] if planned else []), *_lines(data)])
    load_recipe(yaml.safe_load(text))
    return text + "\n"


def _fitted(
    recipe: "Recipe", model: _Pretrained | None, *, memory_gb: float, gpus: int, fixed: Sequence[str]
) -> tuple["Recipe", list[str], str]:
    """Return a recipe that fits a GPU at the least cost in time, the names of fields that it changed, and a comment.

    Raises:
        ConfigError: if nothing fits, or the model's configuration cannot be read.
    """
    from agentrl.run.doctor import changed, cheapest_fit
    from agentrl.run.memory import GB

    if model is not None and model.num_weights is None:
        raise ConfigError("--memory: the hub cannot be reached; give --model a folder with the model's config.json")
    fit = cheapest_fit(recipe, gpus=gpus, memory=int(memory_gb * GB), fixed=fixed)
    if fit is None:
        raise ConfigError(f"--memory: nothing fits {gpus} x {memory_gb:g} GB; take more GPUs, or a smaller model")
    changes, needed = fit
    words = f"# Planned for {gpus} x {memory_gb:g} GB: a training process needs {needed / GB:.1f} (`agentrl plan`)."
    return changed(recipe, changes), list(changes), words


def _look_at_model(name: str, *, is_adapted: bool) -> _Pretrained:
    """Look at the configuration of a model.

    Raises:
        ConfigError: if there is no such model.
    """
    from agentrl.policy.model import open_config
    from agentrl.run.memory import count_weights

    try:
        _, config = open_config(name, field="--model")
    except UnreachableError:
        return _Pretrained(name, None, sys.maxsize, is_adapted)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return _Pretrained(name, count_weights(config, None).total, positions, is_adapted)


def _of_played(overrides: Sequence[str]) -> list[str]:
    """Return the fields of the environment or the agent: others may fit only the recipe that is being made."""
    kept, is_kept = [], False
    for word in overrides:
        if word.startswith("--"):
            field = word.partition("=")[0]
            is_kept = field in ("--env", "--agent") or field.startswith(("--env.", "--agent."))
        if is_kept:
            kept.append(word)
    return kept


def _look(env: Env) -> _Sizes:
    """Let the oracle play a few tasks, if there is one; else look at their beginnings."""
    base = base_env(env)
    described = describe(base)
    tasks, num = Tasks(seed=0, num=described.num_tasks), described.num_tasks.train
    turns = action_chars = chars = 0
    has_oracle = True
    for index in range(_TASKS if num is None else min(_TASKS, num)):
        said = list(reset(env, base, tasks.train(index), rollout_index=0).messages)
        for turn in range(1, _MAX_TURNS + 1):
            try:
                action = ask_oracle(base)
            except NotImplementedError:
                has_oracle = False
                break
            reply = step(env, base, action)
            said += [action, *reply.messages]
            turns, action_chars = max(turns, turn), max(action_chars, _length(action))
            if reply.terminated or reply.truncated:
                break
        chars = max(chars, sum(map(_length, said)))
    size = chars + len(json.dumps(described.tools))
    return _Sizes(turns, action_chars, size, has_oracle, has_tools=bool(described.tools))


def _look_at_agent(config: "AgentConfig") -> _Sizes:
    """Find the agent, and look at its tasks.

    Raises:
        UserError: for an agent or tasks that are not there.
    """
    config.client()
    longest = max(len(json.dumps(row)) for row in config.table.splits["train"][:_TASKS])
    return _Sizes(0, 0, longest + _AGENT_CHARS, has_oracle=False, has_tools=False)


def _max_turns(seen: _Sizes) -> int:
    return seen.turns + math.ceil(seen.turns / 2) if seen.has_oracle else 8


def _of_pretrained(model: _Pretrained, seen: _Sizes) -> Data:
    """Return a recipe for a pretrained model: rates, lengths and precision follow its size."""
    max_turns, small = _max_turns(seen), model.is_small
    # A small model is brief once it has learned to be; a large one may think before it acts.
    turn_tokens = max(64, _rounded(seen.action_chars / _CHARS_A_TOKEN, 32)) if small else 512
    episode_tokens = max_turns * turn_tokens if small else 4096
    context = max(2048 if small else 8192, _rounded(seen.chars / _CHARS_A_TOKEN + episode_tokens, 1024))
    limits = {
        "max_turns": max_turns,
        "max_turn_tokens": turn_tokens,
        "cut_off": "act",
        "max_episode_tokens": episode_tokens,
        "max_context_tokens": min(context, model.positions),
    }
    warmup = {"warmup": {"steps": 20, "skill": 0.5}} if small and seen.has_oracle and seen.has_tools else {}
    return {
        "model": {"name_or_path": model.name},
        **warmup,
        "rollout": {"num_groups": 8, "group_size": 8, "temperature": 1.0, **limits},
        "credit": {"scheme": "uniform"},
        "train": {
            "steps": 100,
            "learning_rate": (1e-5 if small else 1e-6) * (10 if model.is_adapted else 1),
            "precision": "float32" if small else "bfloat16",
            "gradient_checkpointing": not small,
        },
        "evaluation": {"every": 10, "num_tasks": 64},
    }


def _of_local(seen: _Sizes) -> Data:
    """Return a recipe for a model that is made here: its limits are those of the oracle."""
    max_turns = _max_turns(seen)
    turn_tokens = _rounded(seen.action_chars / _CHARS_A_TOKEN, 16) if seen.has_oracle else 64
    context = _rounded(seen.chars / _CHARS_A_TOKEN + max_turns * turn_tokens, 256)
    limits = {
        "max_turns": max_turns,
        "max_turn_tokens": turn_tokens,
        "max_episode_tokens": max_turns * turn_tokens,
        "max_context_tokens": context,
    }
    warmup = {"warmup": {"steps": 300, "num_demonstrations": 2000, "skill": 0.5}} if seen.has_oracle else {}
    return {
        "model": {"local": {"hidden_size": 128, "num_layers": 2, "max_positions": max(4096, context)}},
        **warmup,
        "rollout": {"num_groups": 8, "group_size": 8, **limits},
        "credit": {"scheme": "uniform"},
        "loss": {"algorithm": "gspo_hybrid"},  # episodes of a tiny model are short
        "train": {"steps": 100, "learning_rate": 3e-4, "schedule": "cosine"},
        "evaluation": {"every": 20, "num_tasks": 64},
    }


def _set(data: Data, recipe: Data, path: Sequence[str]) -> None:
    """Copy what stands in the whole recipe under a path."""
    *sections, name = path
    for section in sections:
        data, recipe = data.setdefault(section, {}), recipe[section]
    data[name] = recipe[name]


def _head(name: str, seen: _Sizes, model: _Pretrained | None) -> Iterator[str]:
    """Yield the comments with which the file begins."""
    yield f"# yaml-language-server: $schema={SCHEMA}"
    yield f"# agentrl train {name}; `agentrl fields` says what else there is, `agentrl fields train` of one section."
    if model is None:
        if not seen.has_oracle:
            yield "# There is no oracle() to warm up from: a model made here learns little; set model.name_or_path."
        return
    if model.num_weights is None:
        yield "# The hub could not be reached: rate and lengths are for billions of parameters, and nothing was tried."
    if seen.has_tools and not model.is_small:
        how = "steps: 20, skill: 0.5" if seen.has_oracle else "dialogues: FILE.jsonl"
        yield f"# If it calls no tool (`agentrl eval {name}` shows its dialogues), begin with  warmup: {{{how}}}"


def _lines(data: Data) -> Iterator[str]:
    from agentrl.recipe.config import Recipe  # here: it loads torch
    from agentrl.recipe.fields import attribute_docstrings

    for section, value in data.items():
        yield ""
        cls = section_of(Recipe.model_fields[section].annotation)
        if not isinstance(value, dict):
            yield f"{section}: {_written(value)}"
            continue
        yield f"{section}:"
        sentences = attribute_docstrings(cls) if cls else {}
        for field, given in value.items():
            if sentence := sentences.get(field):
                yield f"  # {_first(sentence)}"
            yield f"  {field}: {_written(given)}"


def _first(sentence: str) -> str:
    """Return the first sentence, without what a colon adds."""
    return f"{sentence.split('. ')[0].rstrip('.')}."


def _written(value: Any) -> str:
    if isinstance(value, float):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")  # YAML takes 1e-06 for text
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _length(message: Message) -> int:
    return len(json.dumps(message, ensure_ascii=False))


def _rounded(number: float, to: int) -> int:
    return to * max(1, math.ceil(number / to))


_ENV, _SMALL = "calculator", "a small one made here"


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    new = commands.add(
        "new",
        _new,
        "Write a commented recipe for an environment, or an agent, and a model; what is not given as an option is asked for. "
        "Any field of the recipe can be given as an option, and stands in it: --train.steps 40",
        overrides=True,
    )
    # NAME, of the file NAME.yaml, is no argument of the parser's: it would take the value of the first `--train.steps 40`.
    new.usage = (
        "agentrl new [NAME] [--env ENV | --agent AGENT --tasks FILE] [--model MODEL] [--FIELD VALUE ...] "
        "| agentrl new [NAME] --dialogue"
    )
    new.add_argument("--env", help="an installed name (`agentrl envs` lists them), module:Class, or a Gymnasium id")
    new.add_argument("--agent", help="in place of an environment: a function, module:function (docs/agents.md)")
    new.add_argument("--tasks", help="with --agent: table of its tasks, such as tasks.jsonl")
    new.add_argument("--model", help="a Hugging Face name or folder; none: a small model is made on the spot")
    new.add_argument(
        "--memory", type=float, help="of a GPU, in GB: write the quickest recipe that fits (`agentrl plan`)"
    )
    new.add_argument("--gpus", type=int, default=1, help="with --memory: how many (default 1)")
    new.add_argument(
        "--dialogue",
        action="store_true",
        help="write an environment in which the agent talks with a user, its test and its recipe (docs/your-environment.md)",
    )


def _new(options: argparse.Namespace, rest: list[str]) -> None:

    name, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else (None, rest)
    if options.dialogue:
        if rest or options.env or options.agent or options.model:
            raise ConfigError("--dialogue writes a recipe of its own: leave the other options out, and edit the file")
        Console(soft_wrap=True).print(write_new_env(name or "table_booking", Path(), template="dialogue"))
        return
    given, played = _played(options)
    file = _file(name or re.sub(r"\W+", "_", given.rpartition(":")[2]).strip("_").lower())
    model = options.model or _asked("Which model? A Hugging Face name or folder", _SMALL)
    text = new_recipe(
        str(file),
        played=played,
        model=None if model in (_SMALL, "none") else model,
        overrides=rest,
        memory_gb=options.memory,
        gpus=options.gpus,
    )
    written = [_write(file, text)]
    if not (file.parent / SCHEMA).exists():
        from agentrl.recipe.fields import sections
        from agentrl.recipe.schema import recipe_schema

        schema = json.dumps(recipe_schema(sections()), indent=1)
        written.append(f"{_write(file.parent / SCHEMA, schema)} (by which editors complete it)")
    Console(soft_wrap=True).print(f"Wrote {' and '.join(written)}. Now:\n  agentrl train {file}")


def _played(options: argparse.Namespace) -> tuple[str, Data]:
    """Return the name of the environment or the agent, and its section."""
    if (options.agent is None) != (options.tasks is None):
        raise ConfigError("--agent: a function needs --tasks, the table of its tasks, and --tasks an --agent")
    if options.agent is not None:
        if options.env is not None:
            raise ConfigError("--agent: it plays in place of an environment; leave out --env")
        return options.agent, {"agent": {"run": options.agent, "tasks": {"tasks": options.tasks}}}
    env = options.env or _asked("Which environment? `agentrl envs` lists them; module:Class is yours", _ENV)
    return env, {"env": {"id": env}}


def _asked(question: str, default: str) -> str:
    """Return the answer of whoever sits there; the default where nobody does."""
    if not sys.stdin.isatty():
        return default
    try:
        return input(f"{question} [{default}]: ").strip() or default
    except EOFError:
        return default


def _file(name: str) -> Path:
    file = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if file.exists():
        raise ConfigError(f"NAME: {file} is there already; choose another name")
    if not file.parent.is_dir():
        raise ConfigError(f"NAME: there is no folder {file.parent}")
    return file


def _write(file: Path, text: str) -> str:
    with file.open("x", encoding="utf-8") as opened:  # never over another
        opened.write(text)
    return str(file)
