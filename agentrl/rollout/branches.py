"""Rollouts that are forked from an episode's turns, to learn what each turn was worth."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

from agentrl.chat import Dialogue
from agentrl.env import close_env
from agentrl.errors import EngineError, EnvError
from agentrl.rollout.conversation import End
from agentrl.rollout.env_calls import Env, copy_env
from agentrl.rollout.env_driver import EnvDriver
from agentrl.rollout.seeds import derive_seed
from agentrl.types import StopReason, Trajectory


class Branches:
    """The forks of one episode: copies of its environment, and the dialogues in which they stood."""

    def __init__(self, driver: EnvDriver, *, on_fault: Callable[[Trajectory], object]) -> None:
        """Begin without any.

        Args:
            driver: of the episode.
            on_fault: told of each rollout whose environment fails.
        """
        self._driver, self._on_fault = driver, on_fault
        self._forks: dict[int, tuple[Env, Dialogue]] = {}
        """By the number of the turn before which they stand."""

    async def fork(self, env: Env) -> None:
        """Copy the environment before an action, where one is due."""
        talk = self._driver.conversation
        number = len(talk.turns)
        if talk.dialogue is not None and number % talk.context.config.branches.every == 0:
            copied = await self._driver.new("fork()", partial(copy_env, env))
            self._forks[number] = copied, talk.dialogue

    async def play(self, trajectory: Trajectory) -> Trajectory:
        """Play one rollout a turn, then a second, within the budget; record what each turn of them earned."""
        config = self._driver.conversation.context.config.branches
        forks = {number: fork for number, fork in self._forks.items() if number < len(trajectory.turns)}
        found: dict[int, list[tuple[float, ...]]] = {number: [] for number in range(len(trajectory.turns))}
        counts = {"branches": 0.0, "branch_tokens": 0.0, "failed_branches": 0.0}
        for count, (number, (env, dialogue)) in product(range(config.num), forks.items()):
            if counts["branch_tokens"] >= config.budget_tokens or self._driver.thread.is_lost:
                break
            branch = await self._play_one(env, dialogue, number, count)
            played = branch.turns[number:]
            counts["branches"] += 1
            counts["branch_tokens"] += sum(len(turn.action_ids) for turn in played)
            counts["failed_branches"] += branch.failed
            if not branch.failed:
                found[number].append(tuple(turn.reward for turn in played))
        turns = tuple(replace(turn, branch_rewards=tuple(found[k])) for k, turn in enumerate(trajectory.turns))
        return replace(trajectory, turns=turns, metrics={**trajectory.metrics, **counts})

    def close(self) -> None:
        """Close the copies, when there is time."""
        for env, _ in self._forks.values():
            self._driver.thread.call_unattended(partial(close_env, env))

    async def _play_one(self, env: Env, dialogue: Dialogue, number: int, count: int) -> Trajectory:
        """Play one rollout from before a turn, with chance of its own."""
        talk = self._driver.conversation
        name = f"{talk.name}/{number}/{count}"
        seed = derive_seed(talk.task.sampling_seed, "branch", name)
        branch = talk.branch(number, dialogue, task=replace(talk.task, sampling_seed=seed), name=name)
        driver = EnvDriver(branch, self._driver.thread, name=self._driver.name)
        with talk.context.engine.conversation(name):
            try:
                copied = await driver.new("fork()", partial(copy_env, env, seed=seed))
                async with driver.closing(copied):
                    await driver.play(copied)
            except EnvError as error:
                driver.failed(error)
            except EngineError as error:
                branch.fail(End(reason=StopReason.ENGINE_ERROR, error=str(error)))
        trajectory = driver.trajectory()
        if trajectory.stop_reason is StopReason.ENV_ERROR:
            self._on_fault(trajectory)
        return trajectory
