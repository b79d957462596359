"""How much of earlier turns a context still shows."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from agentrl.types import Count, Message

LEFT_OUT = "(an earlier result, left out)"
"""What stands in the place of a tool result that is no longer shown."""


class HistoryConfig(BaseModel):
    """What the next context shows of what was said before. The opening and the replies to the last action are always shown.

    Where less is shown than before, history is rewritten: the turn that follows begins a segment of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_results: Count | None = None
    """So many of the newest tool results are shown; of an older one, a short line. Null: all."""
    turns: Count | None = None
    """So many of the last turns, actions with the replies to them, are shown beside the opening. Null: all."""

    @property
    def rewrites(self) -> bool:
        """Tell whether history may be rewritten."""
        return self != HistoryConfig()

    def shown(self, messages: Sequence[Message], *, num_opening: int) -> list[Message]:
        """Return the messages that the next context shows.

        Args:
            messages: all that was said, the replies to the last action included.
            num_opening: how many of them were said before the first action.
        """
        opening, later = list(messages[:num_opening]), list(messages[num_opening:])
        actions = [index for index, message in enumerate(later) if message["role"] == "assistant"]
        if not actions:
            return opening + later
        results = [index for index, message in enumerate(later) if message["role"] == "tool"]
        for index in results[: -self.tool_results] if self.tool_results else ():
            if index < actions[-1]:
                later[index] = {**later[index], "content": LEFT_OUT}
        first = 0 if self.turns is None else actions[-self.turns :][0]
        return opening + later[first:]
