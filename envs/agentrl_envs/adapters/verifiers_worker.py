"""Runs where verifiers is installed, apart from agentrl: tasks and scores of a taskset, a JSON object a line.

`python -P worker.py ID CONFIG MAX_TASKS`. Standard output belongs to the protocol; whatever else prints goes to stderr.
"""

import asyncio
import itertools
import json
import os
import sys
from typing import Any


def main() -> None:
    """Load the taskset, and answer until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(reply: dict[str, Any]) -> None:
        out.write(json.dumps(reply) + "\n")
        out.flush()

    try:
        tasks = load(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
        say({"tasks": [described(task) for task in tasks]})
    except BaseException as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(asyncio.run(score(tasks[asked["task"]], asked["messages"])))
        except Exception as error:  # noqa: BLE001 - a scorer may raise anything
            say({"error": f"{type(error).__name__}: {error.__cause__ or error}"})


def load(taskset_id: str, config: dict[str, Any], max_tasks: int) -> list[Any]:
    """Return the first tasks of a taskset."""
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    taskset = load_taskset(taskset_config_type(taskset_id)(id=taskset_id, **config))
    if type(taskset).toolsets(taskset.config) or taskset.task_type().NEEDS_CONTAINER:
        raise ValueError(f"{taskset_id} needs tools or a container of its own; only tasksets of text can be played")
    return list(itertools.islice(taskset, max_tasks))


def described(task: Any) -> dict[str, Any]:
    """Return the prompt of a task, and the answer if the task's data have one."""
    data = task.data
    if type(task).toolsets(task.config) or data.prompt is None:
        raise ValueError(f"task {data.idx} needs tools or a user of its own; only tasks of text can be played")
    prompt = data.prompt
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [plain(message) for message in prompt]
    if data.system_prompt is not None:
        said = [{"role": "system", "content": data.system_prompt}, *said]
    answer = getattr(data, "answer", None)
    return {"messages": said, "answer": None if answer is None else str(answer)}


def plain(message: Any) -> dict[str, str]:
    """Return a message as role and text."""
    from verifiers.v1.types import content_text

    return {"role": message.role, "content": content_text(message.content)}


async def score(task: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return the rewards, weighted, and the metrics of a dialogue whose last message is the agent's."""
    from verifiers.v1 import (
        AgentConfig,
        AgentInfo,
        AssistantMessage,
        MessageNode,
        SystemMessage,
        Trace,
        TraceTask,
        UserMessage,
    )

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    nodes = [
        MessageNode(
            parent=k - 1 if k else None,
            message=kinds[message["role"]](content=message["content"]),
            sampled=k == len(messages) - 1,
        )
        for k, message in enumerate(messages)
    ]
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        agent=AgentInfo(config=AgentConfig()),
        nodes=nodes,
        is_completed=True,
    )
    await task.score(trace, None)
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return {"rewards": rewards, "skipped": sorted(trace.rewards.keys() - rewards.keys())}


if __name__ == "__main__":
    main()
