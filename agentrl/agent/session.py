"""Session of an agent: the address of the policy for one episode, and what the agent reports about it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.endpoint.call import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """Address of the policy for one episode. `base_url` and `api_key` fit every SDK that speaks to OpenAI's API."""

    base_url: str
    api_key: str = field(repr=False)
    anthropic_url: str
    """Base URL of Anthropic's SDKs, which add `/v1` themselves."""
    seed: int
    """Seed of the task, the same for its whole group: random choices that follow from it can be repeated."""
    split: str
    """`train` or `eval`."""
    report: Callable[[Report], None] = field(repr=False)
    """Function that takes a report. It raises `RefusedError`."""

    def reward(self, reward: float, *, call: str | None = None) -> None:
        """Pay for an answer of the policy: for the newest, or for the one with this id, which its response has.

        Raises:
            RefusedError: for what is no finite number, and for an id that no answer of this session has.
        """
        self.report(Report.of_reward(reward, call))

    def state(self, key: str) -> None:
        """Name the situation that the policy is in from now on: equal keys mean equal situations.

        Raises:
            RefusedError: for what is no text.
        """
        self.report(Report.of_state(key))
