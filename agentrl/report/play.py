"""Episodes in the terminal: an environment that a person plays, and a recorded episode played again in its environment."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from agentrl.chat.forms.form import typed
from agentrl.env import ask_oracle, base_env, describe, tool_call
from agentrl.errors import ConfigError
from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord, read_records
from agentrl.report.terminal import said
from agentrl.rollout.env_driver import Env, EnvReply, reset, reset_options, step
from agentrl.rollout.tasks import EnvTask, Tasks
from agentrl.types import FinishReason, Message, Split

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
        earned, turns = earned + (reply.reward or 0.0), turns + 1
        yield from map(said, reply.messages)
        yield Text(f"[turn {turns}: {_reward(reply)}{_parts(reply)}]", "dim")
    told = [
        f"{key} {reply.info[key]:g}" for key in ("success", "score") if isinstance(reply.info.get(key), int | float)
    ]
    yield Text(f"The task is over after {turns} turns: {', '.join([f'reward {earned:g}', *told])}.", "bold")


def nth_task(env: Env, split: Split, number: int, *, seed: int) -> EnvTask:
    """Return a task of a run with that seed, by its number.

    Raises:
        ConfigError: if there is none.
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


def _reward(reply: EnvReply) -> str:
    return "no score" if reply.reward is None else f"reward {reply.reward:g}"


def _parts(reply: EnvReply) -> str:
    parts = reply.info.get("reward_components") or {}
    told = ", ".join(f"{name} {amount:g}" for name, amount in parts.items())
    return f" ({told})" if len(parts) > 1 else ""


def replay(env: Env, record: TrajectoryRecord) -> Iterator[Text]:
    """Take an episode's recorded actions again; yield the dialogue.

    Raises:
        Exception: whatever the environment raises, and an EnvError where it breaks its contract.
    """
    base, member = base_env(env), int(record.trajectory_id.rpartition("/")[2])
    task = EnvTask(seed=record.seed, split=record.split, index=record.task_index)
    yield Text(f"reset(seed={record.seed}, options={reset_options(task, rollout_index=member)})", "dim")
    reply = reset(env, base, task, rollout_index=member)
    for number, turn in enumerate(record.turns, 1):
        yield from map(said, reply.messages)
        if list(reply.messages) != turn.observation:
            yield Text("The record has other messages here, so the episode is another from here on:", "yellow")
            yield from map(said, turn.observation)
        yield said(turn.message)
        if turn.finish_reason is not FinishReason.STOP:
            yield Text("It was cut off here, and never carried out.", "dim")
            return
        reply = step(env, base, turn.message)
        end = "".join(f", {name}" for name in ("terminated", "truncated") if getattr(reply, name))
        yield Text(f"[turn {number}: {_reward(reply)}{end}]", "dim")
    yield from map(said, reply.messages)


def find(run: Path, episode: str) -> TrajectoryRecord:
    """Return the newest record of an episode: those whose environment failed are looked through first.

    Raises:
        ConfigError: if the run keeps none.
    """
    folder = RunFolder.open(run)
    if re.fullmatch(r".+/[0-9]{1,9}", episode) is None:
        raise ConfigError(f"expected the name of an episode, such as train/000012/3, got {episode!r}")
    failed = folder.kept_faults()
    for path in (*sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True), *reversed(folder.rollouts())):
        for record in read_records(path):
            if record.trajectory_id == episode:
                return record
    raise ConfigError(
        f"{run} keeps no episode {episode!r}: it keeps those of the steps that report.rollouts_every says, and some whose "
        f"environment failed (agentrl show {run} --faults)"
    )
