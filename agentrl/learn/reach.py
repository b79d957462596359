"""How far a step may move the policy: `train.target_kl`."""

from collections.abc import Callable

from torch import Tensor

from agentrl.learn.kept_versions import TrainedWeights
from agentrl.learn.metrics import divergence
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.tally import Tally

_MOST_HALVINGS = 6


class Reach:
    """Bounds the KL divergence between the policy before a step and after each of its updates, by backtracking.

    A trust region of the loss stops the push on tokens that have moved; what other tokens' updates do to them it does not
    bound. Source of the line search: TRPO, arXiv 1502.05477, appendix C.
    """

    def __init__(self, state: PolicyState, *, target: float | None) -> None:
        """Begin a step.

        Args:
            state: the policy.
            target: the bound, in nats a token. None: there is none.
        """
        self.target = target
        self._weights = TrainedWeights(state.policy.parameters())
        self._before: list[Tensor] | None = None
        self._start = 0.0
        self._num_updates = 0
        self._is_counted = False
        """The newest update, as one that was shortened: the minibatches after it that have no gradient look at it again."""

    def begin_update(self) -> None:
        """Keep the weights before an update."""
        if self.target is not None:
            self._before = None  # which makes room for the copy
            self._before, self._is_counted = self._weights.copy(), False

    def shorten(self, tally: Tally, show: Callable[[], Tally]) -> bool:
        """Halve the newest update until the policy is within reach; return whether that was necessary.

        Args:
            tally: what the next minibatch shows.
            show: shows it again.
        """
        if self.target is None:
            return False
        if self._before is None:
            self._start = divergence(tally)  # of the engine
            return False
        halvings = 0
        while divergence(tally) - self._start > self.target and halvings < _MOST_HALVINGS:
            halvings += 1
            self._weights.set(self._before, share=0.5 if halvings < _MOST_HALVINGS else 1.0)
            tally = show()
        if halvings and not self._is_counted:
            self._num_updates, self._is_counted = self._num_updates + 1, True
        return halvings > 0

    def metrics(self) -> dict[str, float]:
        """Tell how often that was."""
        return {} if self.target is None else {"shortened_updates": float(self._num_updates)}
