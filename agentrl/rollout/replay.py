"""An interrupted episode, played again: its tokens come from the record, and all else must come out as recorded."""

from collections.abc import Sequence
from itertools import pairwise

from agentrl.chat import Dialogue, HistoryConfig, Renderer
from agentrl.chat.renderer import Tools
from agentrl.errors import AgentRLError
from agentrl.plain_data import abbreviated
from agentrl.rollout.live_episode import LiveEpisode
from agentrl.types import Completion, Message, Turn

_COMPARED = ("observation", "reward", "state_key", "next_state_key", "action_key")
"""What a turn that is played again must have in common with the recorded one, beside the action."""


class ReplayError(AgentRLError):
    """An episode that is played again is not the one that was recorded."""


class Record:
    """What is known of an episode that was interrupted.

    The tokens of a turn that is played again are those recorded, whatever engine and renderer would make of it today.
    """

    def __init__(self, live: LiveEpisode, *, view: HistoryConfig) -> None:
        """Take what is known.

        Args:
            live: the episode, as far as it was played.
            view: how much of its history a context shows.
        """
        self.live, self._view = live, view

    def has(self, number: int) -> bool:
        """Tell whether a turn was recorded."""
        return number < len(self.live.turns)

    def completion(self, number: int) -> Completion | None:
        """Return what was sampled of a turn's action, whole or in part. None: nothing."""
        if not self.has(number):
            return self.live.partial if number == len(self.live.turns) else None
        turn = self.live.turns[number]
        return Completion(
            token_ids=turn.action_ids,
            logprobs=turn.behavior_logprobs,
            versions=turn.versions,
            finish_reason=turn.finish_reason,
            experts=turn.experts,
        )

    def opening(self, messages: Sequence[Message], tools: Tools) -> Dialogue | None:
        """Return the dialogue before the first action. None: no action was recorded."""
        if not self.has(0):
            return None
        return Dialogue.of_record(messages, tools, self.live.turns[0].observation_ids, view=self._view)

    def after(
        self, number: int, dialogue: Dialogue, action_ids: tuple[int, ...], message: Message, replies: Sequence[Message]
    ) -> Dialogue | None:
        """Return the dialogue before a turn, given the one before the last action. None: that turn was not recorded."""
        if not self.has(number):
            return None
        turn = self.live.turns[number]
        return dialogue.after_record(action_ids, message, replies, turn.observation_ids, extends=turn.extends)

    def restored(self, tools: Tools, renderer: Renderer) -> Dialogue:
        """Return the dialogue after all that was recorded, which is not played again."""
        turns = self.live.turns
        dialogue = Dialogue.of_record(turns[0].observation, tools, turns[0].observation_ids, view=self._view)
        for turn, following in pairwise(turns):
            dialogue = dialogue.after_record(
                turn.action_ids,
                turn.message,
                following.observation,
                following.observation_ids,
                extends=following.extends,
            )
        return dialogue.after(turns[-1].action_ids, turns[-1].message, self.live.observation or (), renderer)

    def check_turn(self, number: int, turn: Turn) -> None:
        """Raise ReplayError where a turn that was recorded comes out otherwise."""
        if not self.has(number):
            return
        for name in _COMPARED:
            found, expected = getattr(turn, name), getattr(self.live.turns[number], name)
            if found != expected:
                raise ReplayError(
                    f"played again, turn {number} has another {name}: {abbreviated(found)}, and was recorded with "
                    f"{abbreviated(expected)}"
                )

    def check_end(self, number: int) -> None:
        """Raise ReplayError where the episode ends with a turn after which more was recorded."""
        if number + 1 < len(self.live.turns) or (number + 1 == len(self.live.turns) and self.live.partial is not None):
            raise ReplayError(f"played again, it ends with turn {number}, and was recorded with more")

    def check_observation(self, number: int, observation: tuple[Message, ...]) -> None:
        """Raise ReplayError where an action was started after other words."""
        live = self.live
        if live.partial is None or live.observation is None or number != len(live.turns):
            return
        if observation != live.observation:
            raise ReplayError(
                f"played again, it says before turn {number} {abbreviated(observation)}, and was recorded with "
                f"{abbreviated(live.observation)}"
            )
