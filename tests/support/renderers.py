"""Renderers under which random weights end their turns."""

from agentrl.chat import ChatMLRenderer


class OftenStops(ChatMLRenderer):
    """Every fourth token ends a turn: random weights sample the one end token too rarely."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted({self._end_id, *range(5, 261, 4)}))
