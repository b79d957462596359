"""Episodes that a program plays: each of its calls for an answer of the policy is a turn.

`AgentPlayer` plays many: the program runs on threads of its own and calls the endpoint, whose loop is another one again.
`AgentPlay` is one episode: it runs the program once, and once more if it fails.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from agentrl.agent.config import AgentConfig
from agentrl.agent.worker import Workers
from agentrl.data.plain import printable
from agentrl.endpoint.server import Endpoint
from agentrl.engine import Sampler
from agentrl.env.rewards.functions import Answered, grade
from agentrl.errors import EngineError
from agentrl.rollout.agent_calls import CallRecord, ClientRun, Crash, Program, Verdict
from agentrl.rollout.conversation import End, LiveEpisode, Partial, Task, episode_metrics
from agentrl.rollout.faults import RaisedError
from agentrl.rollout.player import Listeners
from agentrl.rollout.sample_action import EpisodeContext
from agentrl.types import (
    Fault,
    Message,
    StopReason,
    Trajectory,
    Turn,
    parent_of,
)

_REWARD_TIMEOUT_S = 55.0
"""Deadline of reward functions that are coroutines."""


class AgentPlay:
    """An episode that a program plays."""

    def __init__(
        self, player: "AgentPlayer", start: LiveEpisode, *, context: EpisodeContext[Sampler], listeners: Listeners
    ) -> None:
        """Take the parts; see `Player.new`."""
        self._player = player
        self._start = start
        self._context = context
        self._listeners = listeners
        self._record = CallRecord(
            turns=list(start.turns), partials={each.call: each.completion for each in start.partials}
        )
        self._run: ClientRun | None = None

    def live(self) -> LiveEpisode:
        """Return the state of the episode."""
        waiting = () if self._run is None else self._run.partials()
        unclaimed = (Partial(completion=each, call=name) for name, each in self._record.partials.items())
        return LiveEpisode(task=self._start.task, turns=tuple(self._record.turns), partials=(*waiting, *unclaimed))

    async def play(self) -> Trajectory:
        """Play to the end; see `Play.play`."""
        task, row = self._start.task, self._player.row(self._start.task)
        try:
            outcome: Verdict | Crash | End = await self._played(row)
            if isinstance(outcome, Crash) and self._is_open and self._player.config.on_error == "result":
                outcome = await self._played_again(row, outcome)
            end, verdict = await self._ended(outcome, row)
        except EngineError as error:
            end, verdict = End(reason=StopReason.ENGINE_ERROR, error=str(error)), Verdict(reward=None)
        trajectory = self._trajectory(task, row, end, verdict)
        if trajectory.failed and trajectory.stop_reason not in (StopReason.UNSCORED, StopReason.ENGINE_ERROR):
            self._listeners.on_fault(trajectory)
        return trajectory

    @property
    def _is_open(self) -> bool:
        """True if no limit has refused a call."""
        return self._run is None or self._run.limit is None

    async def _played(self, row: dict[str, Any]) -> Verdict | Crash:
        """Run the program once."""
        task = self._start.task
        on_change = self._listeners.on_change
        self._run = ClientRun(
            self._player.program,
            task,
            self._record,
            context=self._context,
            on_change=lambda: on_change and on_change(self.live()),
            name=f"{task.trajectory_id}#{task.attempt}",
        )
        return await self._run.play(copy.deepcopy(row))

    async def _played_again(self, row: dict[str, Any], first: Crash) -> "Verdict | Crash | End":
        """Run a program that failed once more on the same answers: the same failure follows from what the policy said."""
        assert self._run is not None, "it was run"
        asked = Counter(call.name for call in self._run.calls)
        second = await self._played(row)
        is_same = isinstance(second, Crash) and second.fault.kind == first.fault.kind
        if is_same and asked and asked == Counter(call.name for call in self._run.calls):
            return End(reason=StopReason.AGENT_ERROR, error=first.words)
        return second

    async def _ended(self, outcome: "Verdict | Crash | End", row: dict[str, Any]) -> tuple[End, Verdict]:
        """Return why the episode is over, and what it earned."""
        run, nothing = self._run, Verdict(reward=0.0)
        assert run is not None, "it was run"
        if isinstance(outcome, End):
            return outcome, nothing
        if isinstance(outcome, Crash):
            return run.limit or End(reason=StopReason.ENV_ERROR, error=outcome.words, fault=outcome.fault), nothing
        if not run.delivered():
            words = f"agent {self._player.name}: it asked the policy nothing; its client must call session.base_url"
            return run.limit or End(reason=StopReason.ENV_ERROR, error=words, fault=Fault(kind="no call")), nothing
        if self._player.rewards:
            try:
                outcome = await asyncio.to_thread(self._player.grade, run.delivered()[-1].said(), row)
            except Exception as error:  # noqa: BLE001 - foreign code: it becomes data
                raised = RaisedError(error)
                words = f"agent {self._player.name}: agent.reward raised {raised.line}"
                return End(reason=StopReason.ENV_ERROR, error=words, fault=raised.fault), nothing
        if outcome.reward is None and not run.rewards:
            words = f"agent {self._player.name}: nothing could score it"
            return End(reason=StopReason.UNSCORED, error=words), outcome
        limit = run.limit
        return End(reason=StopReason.TERMINATED) if limit is None else replace(limit, error=None, fault=None), outcome

    def _trajectory(self, task: Task, row: Mapping[str, Any], end: End, verdict: Verdict) -> Trajectory:
        run = self._run
        assert run is not None, "it was run"
        turns = _in_order(self._record.turns, run, verdict)
        answer = self._player.config.tasks.answer
        return Trajectory(
            group_id=task.group_id,
            trajectory_id=task.trajectory_id,
            env_id=self._player.name,
            seed=task.seed,
            split=task.split,
            task_index=task.task_index,
            turns=turns,
            stop_reason=end.reason,
            truncated=end.truncated,
            metrics={**episode_metrics(turns, ()), **run.counted(self._record), **verdict.metrics},
            error=None if end.error is None else printable(end.error),
            fault=end.fault,
            gold_answer=None if answer is None else str(row[answer]),
        )


def _in_order(turns: Sequence[Turn], run: ClientRun, verdict: Verdict) -> tuple[Turn, ...]:
    """Return the turns that the program has read, in the order in which they were asked, with all that they earned."""
    calls = {call.turn: call for call in run.delivered() if call.turn is not None}
    kept = sorted(calls)
    numbers = {old: new for new, old in enumerate(kept)}
    found: list[Turn] = []
    for new, old in enumerate(kept):
        turn, call = turns[old], calls[old]
        parent = numbers.get(parent_of(turn, old), -1)
        reward = run.rewards.get(call.asked.number, 0.0)
        is_last = new == len(kept) - 1
        following = next((calls[k].state_key for k in kept if k > old and parent_of(turns[k], k) == old), None)
        found.append(
            replace(
                turn,
                parent=None if parent in (-1, new - 1) else parent,
                extends=new == 0 or turn.extends,
                reward=reward + (verdict.reward or 0.0) * is_last,
                next_state_key=run.state_key if is_last else following,
                extras={**turn.extras, **verdict.extras} if is_last and verdict.extras else turn.extras,
            )
        )
    return tuple(found)


class AgentPlayer:
    """Plays episodes by a program, many at once, and has the endpoint that it calls."""

    def __init__(self, config: AgentConfig, *, on_warning: Callable[[str], object] = lambda _: None) -> None:
        """Find the program and its tasks; nothing runs yet.

        Args:
            config: section `agent` of the recipe.
            on_warning: called once for each parameter that a client gives and that is not taken over.

        Raises:
            UserError: for a program that is none, and for tasks that cannot be played.
        """
        self.config = config
        self.name = config.name
        self._client = config.client()
        self.rewards = config.rewards()
        self.on_warning = on_warning
        self._ignored: set[str] = set()
        self._program: Program | None = None
        self._open = ExitStack()

    def new(
        self,
        start: LiveEpisode,
        *,
        context: EpisodeContext[Sampler],
        listeners: Listeners,
        fork: bool = False,  # noqa: ARG002 - refused before: a program cannot be forked
    ) -> AgentPlay:
        """Return an episode; see `Player.new`."""
        return AgentPlay(self, start, context=context, listeners=listeners)

    @property
    def program(self) -> Program:
        """The program, and the endpoint that it calls; that listens from the first episode on.

        Raises:
            ConfigError: for an address that is not free.
        """
        if self._program is None:
            config = self.config
            endpoint = Endpoint(
                ("policy", *config.roles),
                host=config.host,
                port=config.port,
                public_host=config.public_host,
                heartbeat_s=config.heartbeat_s,
            )
            self._program = Program(
                config=config,
                client=self._client,
                endpoint=self._open.enter_context(endpoint),
                on_ignored=self._note_ignored,
            )
        return self._program

    def row(self, task: Task) -> dict[str, Any]:
        """Return the row of a task."""
        rows = self.config.table.splits[task.split]
        return rows[(task.task_index or 0) % len(rows)]

    def _note_ignored(self, ignored: Mapping[str, str]) -> None:
        """Warn once of each parameter that is not taken over."""
        for name, value in ignored.items():
            if name not in self._ignored:
                self._ignored.add(name)
                self.on_warning(
                    f"agent {self.name}: {name}: {value} is not taken over: the recipe decides how the policy samples"
                )

    def grade(self, said: Sequence[Message], row: Mapping[str, Any]) -> Verdict:
        """Grade the last answer; called on a thread of its own.

        Raises:
            Exception: whatever a reward function raises.
        """
        tasks, task = self.config.tasks, copy.deepcopy(dict(row))
        answered = Answered(
            prompt=task[tasks.prompt] if tasks.prompt else None,
            completion=said[-1].get("content") or "",
            messages=list(said),
            answer=task[tasks.answer] if tasks.answer else None,
            task=task,
            info={},
        )
        graded = grade(self.rewards, answered, timeout_s=_REWARD_TIMEOUT_S)
        paying = [reward for reward in self.rewards if reward.name in graded and reward.weight]
        first = graded.get(self.rewards[0].name)
        metrics = {} if first is None else {"success": float(first >= 1.0), "score": min(1.0, max(0.0, first))}
        reward = sum(each.weight * graded[each.name] for each in paying) if paying else None
        return Verdict(reward=reward, metrics=metrics)

    def close(self) -> None:
        """Close the endpoint, and end the processes of a function."""
        self._program = None
        if isinstance(self._client, Workers):
            self._client.close()
        self._open.close()
