"""A recipe to begin with: limits that fit its environment, and what each field is in a comment."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from agentrl.config import Recipe, load_recipe
from agentrl.env import ask_oracle, base_env, close_env, describe
from agentrl.fields.docstrings import attribute_docstrings
from agentrl.plugin import section_of
from agentrl.rollout.env_calls import Env, reset, step
from agentrl.rollout.fault import environment_failures
from agentrl.rollout.tasks import Tasks
from agentrl.types import Message

SCHEMA = "recipe.schema.json"
_TASKS, _MAX_TURNS = 8, 60
_CHARS_A_TOKEN = 2
"""Of a tokenizer that is trained on the environment's own dialogues: at least so many, as a rule."""

Data = dict[str, Any]


class _Seen(NamedTuple):
    """What a few episodes of the environment's oracle were like."""

    turns: int
    action_chars: int
    """Of the longest action."""
    chars: int
    """Of the longest episode, with the schemas of tools."""
    has_oracle: bool


def new_recipe(name: str, *, env: str, model: str | None, overrides: Sequence[str]) -> str:
    """Return the text of a recipe that trains at once.

    Args:
        name: of the file, for its first comment.
        env: its id.
        model: a Hugging Face name or folder. None: a small one is made.
        overrides: further fields, as on the command line; they stand in the recipe.

    Raises:
        UserError: for an environment that cannot be made or played, and fields that cannot be set.
    """
    config = load_recipe({"env": {"id": env}}, _of_env(overrides)).env
    with environment_failures():
        made = config.make()
        try:
            seen = _look(made)
        finally:
            close_env(made)
    data = _proposed(env, model, seen)
    recipe = load_recipe(data, overrides).model_dump(mode="json")
    for option in (word.partition("=")[0] for word in overrides if word.startswith("--")):
        _set(data, recipe, option.removeprefix("--").split("."))
    text = "\n".join(_lines(name, data, is_helpless=model is None and not seen.has_oracle))
    load_recipe(yaml.safe_load(text))
    return text + "\n"


def _of_env(overrides: Sequence[str]) -> list[str]:
    """Return the fields of the environment: others may fit only the recipe that is being made."""
    kept, is_kept = [], False
    for word in overrides:
        if word.startswith("--"):
            field = word.partition("=")[0]
            is_kept = field == "--env" or field.startswith("--env.")
        if is_kept:
            kept.append(word)
    return kept


def _look(env: Env) -> _Seen:
    """Let the oracle play a few tasks, where there is one; else look at their beginnings."""
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
    return _Seen(turns, action_chars, chars + len(json.dumps(described.tools)), has_oracle)


def _proposed(env: str, model: str | None, seen: _Seen) -> Data:
    max_turns = seen.turns + math.ceil(seen.turns / 2) if seen.has_oracle else 8
    if model is not None:
        rollout = {
            "max_turns": max_turns,
            "max_turn_tokens": 512,
            "max_episode_tokens": 4096,
            "max_context_tokens": 8192,
        }
        return {
            "env": {"id": env},
            "model": {"name_or_path": model},
            "rollout": {"num_groups": 8, "group_size": 8, **rollout},
            "credit": {"scheme": "uniform"},
            "train": {"steps": 100, "learning_rate": 1e-6, "gradient_checkpointing": True},
            "evaluation": {"every": 20, "num_tasks": 64},
        }
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
        "env": {"id": env},
        "model": {"local": {"hidden_size": 128, "num_layers": 2, "max_positions": max(4096, context)}},
        **warmup,
        "rollout": {"num_groups": 8, "group_size": 8, **limits},
        "credit": {"scheme": "uniform"},
        "train": {"steps": 100, "learning_rate": 3e-4, "schedule": "cosine"},
        "evaluation": {"every": 20, "num_tasks": 64},
    }


def _set(data: Data, recipe: Data, path: Sequence[str]) -> None:
    """Copy what stands in the whole recipe under a path."""
    *sections, name = path
    for section in sections:
        data, recipe = data.setdefault(section, {}), recipe[section]
    data[name] = recipe[name]


def _lines(name: str, data: Data, *, is_helpless: bool) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={SCHEMA}"
    yield f"# agentrl train {name}; `agentrl fields` says what else there is, `agentrl fields train` of one section."
    if is_helpless:
        yield "# The environment has no oracle() to warm up from: a model made here learns little; set model.name_or_path."
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
