"""The same tokens give the same update, and the same learning, whether an environment or a program has played.

    python -m benchmarks.endpoint_learning update
    python -m benchmarks.endpoint_learning curves --out FILE [--seeds 0 1 2 3 4] [--clients openai langgraph]

`update`: a dialogue is played as an environment, and by openai's client; an engine says the same words to both. Both groups
update the same small model. `same_rows` compares contexts, actions and selected tokens, `same_loss` all metrics of the update,
its loss among them, and `same_weights` all weights afterwards, to the bit.

`curves`: for each seed a small model is warmed up as `examples/calculator.yaml` does; from there it is trained in the
environment `calculator`, and by programs that play the same tasks by openai's client or as a graph of LangGraph (the packages
of `tests/support/agents/requirements.txt`), which know no more of agentrl than the calculator that they ask. `area` is the mean
reward of held-out tasks over the evaluations after training began; `of_environment` is a client's mean area over that of the
environment, by seed as well. Results are appended to FILE, and what is in it is not run again.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from agentrl import Credit, TrajectoryGroup
from agentrl.agent.session import AgentSession
from agentrl.learn.tokens import TokenBatch
from agentrl.report.folder import RunFolder
from agentrl.rollout import EnvPlayer, Player
from agentrl.rollout.tasks import EnvTask
from agentrl.types import Message
from agentrl_envs.calculator import Calculator
from benchmarks.endpoint_overhead import REPLY, Dialogue
from benchmarks.endpoint_pools import MessageEngine, agent_player, open_pool, text
from benchmarks.result_lines import ROOT, append_line, read_lines
from tests.support.learners import make_learner, weights

TURNS, GROUP_SIZE = 3, 4


async def solve(task: dict[str, Any], session: AgentSession) -> None:
    """Play the dialogue, and pay for each answer."""
    messages: list[Any] = [REPLY]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(task["turns"]):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            session.reward(1.0)
            messages += [answer.choices[0].message, REPLY]


def say(name: str, prompt: str) -> Message:
    """Say something that follows from the episode's number and the prompt."""
    return text("a" * (1 + zlib.crc32(f"{name.partition('#')[0]} {prompt}".encode()) % 40))


def play(player: Player) -> TrajectoryGroup:
    """Return a group of dialogues."""
    with open_pool(player, MessageEngine(say)) as (runner, pool):
        (group,) = runner.run(pool.play({"learning/0": EnvTask(seed=0, index=0)}, group_size=GROUP_SIZE))
    return group


def update(group: TrajectoryGroup) -> tuple[dict[str, float], torch.Tensor]:
    """Return the metrics of one update by a group, and all weights after it."""
    learner = make_learner(num_minibatches=1)
    credits = [
        Credit.from_tokens(trajectory, np.full(trajectory.num_action_tokens, (-1.0) ** number))
        for number, trajectory in enumerate(group.trajectories)
    ]
    return dict(learner.update([group], [credits], version=1)), weights(learner)


def rows(group: TrajectoryGroup) -> list[list[int]]:
    """Return contexts, actions and selected tokens."""
    batch = TokenBatch.from_trajectories(group.trajectories)
    return [*(row.tolist() for row in batch.rows), batch.position_T.tolist(), batch.target_T.tolist()]


def figures() -> dict[str, Any]:
    """Return the figures."""
    agent = {"run": "benchmarks.endpoint_learning:solve", "tasks": {"tasks": [{"turns": TURNS}], "eval_share": 0}}
    groups = [play(EnvPlayer(lambda: Dialogue(turns=TURNS, stagger_s=0))), play(agent_player(agent))]
    (in_env, env_weights), (by_agent, agent_weights) = map(update, groups)
    return {
        "tokens": sum(len(turn.action_ids) for t in groups[1].trajectories for turn in t.turns),
        "same_rows": rows(groups[0]) == rows(groups[1]),
        "same_rewards": [[turn.reward for turn in t.turns] for t in groups[0].trajectories]
        == [[turn.reward for turn in t.turns] for t in groups[1].trajectories],
        "same_loss": in_env == by_agent,
        "same_weights": bool(torch.equal(env_weights, agent_weights)),
    }


RECIPE = str(ROOT / "examples" / "calculator.yaml")
NUM_TASKS, NUM_TRAIN_TASKS = 128, 1024
OPTIONS = (
    *("--chat.renderer", "chatml", "--warmup.steps", "0", "--train.steps", "120", "--train.schedule", "constant"),
    *("--evaluation.every", "20", "--evaluation.num_tasks", str(NUM_TASKS)),
)
"""Of a run after the warm-up: half of the recipe's steps, at its rate."""
AGENT = {
    "tasks": {
        "tasks": [{"number": n} for n in range(NUM_TASKS + NUM_TRAIN_TASKS)],
        "eval_share": NUM_TASKS / (NUM_TASKS + NUM_TRAIN_TASKS),
    },
    "provides": ["turn_rewards"],
}
PLAYERS: dict[str, list[str]] = {
    "environment": ["--env.options.prompt", "short"],
    "openai": ["--agent", json.dumps(AGENT | {"run": "benchmarks.endpoint_learning:by_openai"})],
    "langgraph": ["--agent", json.dumps(AGENT | {"run": "benchmarks.endpoint_learning:by_langgraph"})],
}


class Exercise:
    """The calculator of one episode, which pays a program's session."""

    def __init__(self, session: AgentSession) -> None:
        self._env, self._session = Calculator(), session
        (self.question,), _ = self._env.reset(seed=session.seed)
        self.tools: list[Any] = self._env.tools
        self.result = {"reward": 0.0, "success": False}

    def step(self, answer: Message) -> list[Message]:
        """Take an answer of the policy; return the results of its calls: none ends the episode."""
        found, reward, _, _, info = self._env.step(answer)
        self._session.reward(reward)
        self.result["success"] = bool(info.get("success"))
        return list(found)


async def by_openai(_task: dict[str, Any], session: AgentSession) -> dict[str, Any]:
    """Play by a loop around openai's client."""
    exercise = Exercise(session)
    messages: list[Any] = [exercise.question]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=exercise.tools)
            message = answer.choices[0].message.to_dict()
            if not (found := exercise.step(message)):
                break
            messages += [message, *found]
    return exercise.result


async def by_langgraph(_task: dict[str, Any], session: AgentSession) -> dict[str, Any]:
    """Play by a graph of two nodes."""
    from langchain_core.messages import convert_to_messages, convert_to_openai_messages
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    exercise = Exercise(session)
    model = ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.api_key).bind_tools(exercise.tools)
    num_turns = 0

    async def ask(state: Any) -> Any:
        nonlocal num_turns
        num_turns += 1
        return {"messages": [await model.ainvoke(state["messages"])]}

    def compute(state: Any) -> Any:
        return {"messages": convert_to_messages(exercise.step(convert_to_openai_messages(state["messages"][-1])))}

    def onward(state: Any) -> str:
        return "ask" if num_turns < 4 and state["messages"][-1].type == "tool" else END

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("compute", compute)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "compute")
    graph.add_conditional_edges("compute", onward)
    await graph.compile().ainvoke({"messages": [exercise.question]})
    return exercise.result


def agentrl(*words: str) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "agentrl", *words], check=True, cwd=ROOT)


def warmed(seed: int, folder: Path) -> Path:
    """Return a model that has seen the recipe's demonstrations; make it if it is not there."""
    model = folder / f"model-{seed}"
    if not model.exists():
        run = str(folder / f"warm-{seed}")
        once = ["--train.steps", "1", "--rollout.num_groups", "1", "--evaluation.every", "0", "--seed", str(seed)]
        agentrl("train", RECIPE, *once, "--quiet", "--run_dir", run)
        agentrl("export", run, str(model), "--step", "0")
    return model


def train(player: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the curve of one run."""
    model, run = warmed(seed, folder), folder / f"{player}-{seed}"
    options = [*OPTIONS, *PLAYERS[player], "--model.name_or_path", str(model), "--seed", str(seed)]
    agentrl("train", RECIPE, *options, "--quiet", "--run_dir", str(run))
    rows = RunFolder.open(run).metrics()
    curves = {name: [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row] for name in ("reward", "success")}
    return {"player": player, "seed": seed, "area": statistics.fmean(curves["reward"][1:]), **curves}


def curves(out: Path, seeds: list[int], clients: list[str]) -> None:
    """Make the runs that are missing, and print how clients compare."""
    players = ["environment", *clients]
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for player in players:
                known = {(line["player"], line["seed"]) for line in read_lines(out)}
                if (player, seed) not in known:
                    append_line(out, train(player, seed, Path(folder)))
    areas = {(line["player"], line["seed"]): line["area"] for line in read_lines(out)}
    for client in clients:
        pairs = [(areas[client, seed], areas["environment", seed]) for seed in seeds]
        ours, theirs = (statistics.fmean(each) for each in zip(*pairs, strict=True))
        by_seed = [round(one / other, 3) for one, other in pairs]
        print(json.dumps({"client": client, "area": ours, "of_environment": ours / theirs, "by_seed": by_seed}))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("update")
    learning = commands.add_parser("curves")
    learning.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    learning.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    learning.add_argument("--clients", nargs="+", choices=list(PLAYERS)[1:], default=list(PLAYERS)[1:])
    options = parser.parse_args()
    if options.command == "update":
        print(json.dumps(figures()))
    else:
        curves(options.out, options.seeds, options.clients)


if __name__ == "__main__":
    main()
