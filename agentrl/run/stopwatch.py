"""How long the parts of a step take."""

import time
from collections.abc import Sequence

from agentrl.types import TrajectoryGroup


class Stopwatch:
    """Notes the seconds from one lap to the next; started when it is made."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str | None = None) -> None:
        """Note the time since the last lap under a name. None: nobody asks for it."""
        now = time.perf_counter()
        if name is not None:
            self._seconds[name] = now - self._last
        self._last = now

    def metrics(self, groups: Sequence[TrajectoryGroup], *, sampling_s: float, is_async: bool) -> dict[str, float]:
        """Return what a step took until its last lap, and its throughput.

        Args:
            groups: that were sampled in the step. Where there is none, throughput is left out.
            sampling_s: for which the engine was busy.
            is_async: it samples in the whole step.
        """
        collect_s, step_s = self._seconds["collect_s"], self._last - self._begin
        everyone = [t for group in groups for t in group.trajectories]
        sampled = sum(t.num_action_tokens + t.metrics.get("branch_tokens", 0.0) for t in everyone)
        throughput = {
            "time/sampled_tokens_per_s": sampled / (step_s if is_async else collect_s),
            "time/tokens_per_s": sampled / step_s,
        }
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()} | {
            "time/sampling_s": sampling_s,
            "time/environment_s": max(0.0, collect_s - sampling_s),
            "time/step_s": step_s,
            **(throughput if everyone else {}),
        }
