"""A largest number of turns."""

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import TimeLimit as StepLimit

from agentrl.types import Message


class TimeLimit(StepLimit[tuple[Message, ...], str | Message]):
    """Gymnasium's `TimeLimit`: an episode that is not over after so many turns is truncated.

    The environment has answered the last of them: with `rollout.max_turns`, which ends an episode before that, it has not.
    """

    def __init__(self, env: gym.Env[tuple[Message, ...], str | Message], *, max_turns: int) -> None:
        """Put it around an environment.

        Args:
            env: what is wrapped.
            max_turns: largest number of turns.
        """
        if not isinstance(max_turns, int) or isinstance(max_turns, bool) or max_turns < 1:
            raise ValueError(f"max_turns: {max_turns!r} is no positive whole number")
        RecordConstructorArgs.__init__(self, max_turns=max_turns)
        super().__init__(env, max_episode_steps=max_turns)
