"""An environment that a person plays in the terminal."""

import shlex
from collections.abc import Callable, Iterator
from typing import Any

from rich.text import Text

from agentrl.chat.forms.schema import typed
from agentrl.env import ask_oracle, base_env, describe, tool_call
from agentrl.errors import ConfigError
from agentrl.report.show import said
from agentrl.rollout.env_calls import Env, EnvReply, reset, step
from agentrl.rollout.tasks import EnvTask, Tasks
from agentrl.types import Message, Split

HELP = (
    "Write an answer, or call a tool: /name key=value ...  (/oracle plays a turn, /tools lists the tools, /quit ends)"
)


def play(env: Env, task: EnvTask, ask: Callable[[], str | None]) -> Iterator[Text]:
    """Let a person play a task; yield what is printed.

    Args:
        env: the environment.
        task: where it begins.
        ask: returns a line that was written; None: there is no more.

    Raises:
        Exception: whatever the environment raises, and an EnvError where it breaks its contract.
    """
    base = base_env(env)
    reply = reset(env, base, task, rollout_index=0)
    tools = reply.tools
    yield from map(described, tools)
    yield Text(HELP, "dim")
    yield from map(said, reply.messages)
    earned, turns = 0.0, 0
    while not (reply.terminated or reply.truncated):
        if (line := ask()) is None or line.strip() == "/quit":
            yield Text(f"You left after {turns} turns, with a reward of {earned:g}.", "dim")
            return
        if line.strip() in ("", "/help", "/tools"):
            yield from map(described, tools)
            yield Text(HELP, "dim")
            continue
        is_oracle = line.strip() == "/oracle"
        slips: tuple[type[Exception], ...] = (NotImplementedError,) if is_oracle else (ValueError,)
        try:
            message = ask_oracle(base) if is_oracle else action(line, tools)
        except slips as error:  # what else an oracle raises is its fault
            yield Text(str(error), "red")
            continue
        if is_oracle:
            yield said(message)
        reply = step(env, base, message)
        earned, turns = earned + reply.reward, turns + 1
        yield from map(said, reply.messages)
        yield Text(f"[turn {turns}: reward {reply.reward:g}{_parts(reply)}]", "dim")
    told = [
        f"{key} {reply.info[key]:g}" for key in ("success", "score") if isinstance(reply.info.get(key), int | float)
    ]
    yield Text(f"The task is over after {turns} turns: {', '.join([f'reward {earned:g}', *told])}.", "bold")


def nth_task(env: Env, split: Split, number: int, *, seed: int) -> EnvTask:
    """Return a task of a run with that seed, by its number.

    Raises:
        ConfigError: where there is none.
    """
    num = describe(base_env(env)).num_tasks
    length = num.train if split == "train" else num.eval
    if number < 0 or (length is not None and number >= length):
        there = "endless ones, from 0" if length is None else length
        raise ConfigError(f"--task: {number} is none of the tasks of {split}; there are {there}")
    tasks = Tasks(seed=seed, num=num)
    return tasks.train(number) if split == "train" else tasks.evaluation(length or number + 1)[number]


def action(line: str, tools: tuple[dict[str, Any], ...]) -> Message:
    """Return the assistant message that a line stands for; arguments have the types of the tool's schema.

    Raises:
        ValueError: saying what is wrong with a call.
    """
    if not line.startswith("/"):
        return {"role": "assistant", "content": line}
    name, *words = shlex.split(line[1:]) or [""]
    arguments = {}
    for word in words:
        key, has_value, text = word.partition("=")
        if not has_value:
            raise ValueError(f"{word!r} is no argument: write key=value, with quotes around a value of several words")
        arguments[key] = typed(text, name, key, tools)
    return tool_call(name, **arguments)


def described(tool: dict[str, Any]) -> Text:
    """Return a tool as it is called, and what it does."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    shown = [key if key in required else f"[{key}]" for key in parameters.get("properties", {})]
    words = str(function.get("description", "")).partition("\n")[0]
    return Text.assemble((" ".join([f"/{function['name']}", *(f"{key}=..." for key in shown)]), "cyan"), f"  {words}")


def _parts(reply: EnvReply) -> str:
    parts = reply.info.get("reward_components") or {}
    told = ", ".join(f"{name} {amount:g}" for name, amount in parts.items())
    return f" ({told})" if len(parts) > 1 else ""
