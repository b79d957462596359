"""The interface of a signal, the context that it is measured with, and the recipe's section `signals`.

No file of a signal loads torch until the signal is made: checks of credit schemes read the declarations alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from agentrl.chat import HistoryConfig, Renderer
from agentrl.credit import CreditScheme
from agentrl.errors import ConfigError
from agentrl.learn.tokens import Row
from agentrl.recipe.plugin import MayChange
from agentrl.types import Amount, AmountOrZero, Count, Need, Rate, Seconds, Trajectory

if TYPE_CHECKING:
    from agentrl.policy.model import Policy


class CriticConfig(BaseModel):
    """A value for each token's context, learned beside the policy by regression on the returns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Literal["head", "separate"] = "head"
    """`head`: two small layers on the policy's hidden states, which they do not change. `separate`: a copy of the policy as
    it begins, trained as a whole; with `model.lora` its adapters are."""
    learning_rate: Rate = 1e-3
    """Step size of AdamW."""
    epochs: Amount = 2
    """Passes over each step's trajectories."""
    num_minibatches: Count = 4
    """Optimizer updates for each pass."""


class SignalsConfig(BaseModel):
    """Sources of the signals that some credit schemes read; none costs anything until a scheme asks for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    critic: CriticConfig = CriticConfig()
    teacher: str | None = None
    """Hugging Face model whose log-probabilities a scheme may read: a folder, or a name on the hub; its vocabulary must be
    the policy's."""
    judge: str | None = None
    """`module:function` that is given a trajectory and returns one score for each of its turns; it may be `async def`. Called
    on threads."""
    judge_timeout_s: Annotated[Seconds, MayChange()] = 60.0
    """Deadline of each call of the judge, in seconds."""
    judge_retries: Annotated[AmountOrZero, MayChange()] = 2
    """Retries of a call of the judge that raised or hung, before the run stops."""
    judge_threads: Annotated[Count, MayChange()] = 8
    """Calls of the judge at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SignalContext:
    """Context in which signals are measured."""

    scheme: CreditScheme
    """The scheme whose `requirements()` are measured."""
    loss_needs: frozenset[Need] = frozenset()
    """Signals that are measured for the loss beside them (`LossConfig.needs`)."""
    config: SignalsConfig
    policy: "Policy"
    """The weights in training."""
    reference: "Policy | None"
    """The policy with which the run began. None: nothing reads it."""
    load_teacher: "Callable[[], Policy]"
    """Called if the scheme or the loss reads a teacher's log-probabilities."""
    renderer: Renderer
    """Renderer of the rollouts."""
    tools: Sequence[dict[str, Any]]
    """Tools of the environment, for contexts that are rendered again."""
    history: HistoryConfig
    """Part of earlier turns that the rollouts' contexts show."""
    temperature: float
    """Temperature of the rollouts, and of all log-probabilities."""
    max_tokens: int
    """Budget of a micro-batch."""
    is_sharded: bool
    """Whether the policy's weights are sharded: no rank will hold all of them."""
    seed: int
    """Seed of the run."""
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the policy's forward pass runs, and every other one here."""

    def check_lengths(self, trajectories: Sequence[Trajectory], rows: Sequence[Sequence[Row]]) -> None:
        """Check that no row of a trajectory, with what was put into it, is longer than the model has positions.

        Raises:
            ConfigError: naming the trajectory and the field to lower.
        """
        limit = getattr(self.policy.model.config.get_text_config(), "max_position_embeddings", None)
        for trajectory, of_trajectory in zip(trajectories, rows, strict=True):
            longest = max(len(row.ids_L) for row in of_trajectory)
            if limit is not None and longest > limit:
                raise ConfigError(
                    f"credit.scheme: trajectory {trajectory.trajectory_id}: what the scheme adds makes a context "
                    f"of {longest} tokens, beyond the model's {limit} positions; lower rollout.max_context_tokens"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Numbers for made-up turns, with which checks ask schemes: they differ from turn to turn.

    `start + step * ((by_trajectory * i + by_turn * k) % period) + by_token * t` for token t of turn k of trajectory i.
    Other factors put the turns into another order.
    """

    start: float
    step: float
    by_trajectory: int
    by_turn: int
    period: int
    by_token: float = 0.0
    in_rewards: bool = False
    """Whether it is in units of reward: twice the rewards come with twice the numbers."""

    def at(self, trajectory: int, turn: int, token: int = 0) -> float:
        """Return the number of a token, or of a turn."""
        place = (self.by_trajectory * trajectory + self.by_turn * turn) % self.period
        return self.start + self.step * place + self.by_token * token


class Signal:
    """One kind of number beside the rewards: `Turn.signals` holds it under the name of its file, which is its `Need`."""

    sample: ClassVar[Sample]
    """Made-up values that checks use."""
    is_per_token: ClassVar[bool] = True
    """True: one number for each action token. False: one for each turn. Records hold either."""
    trajectory_sample: ClassVar[float | None] = None
    """Value that checks put into `Trajectory.signals`, in the unit of `sample`. None: it has no value per trajectory."""
    hint: ClassVar[str] = ""
    """Field to set if `is_provided` is False; empty if only the environment can help."""

    def __init__(self, context: SignalContext) -> None:
        """Keep the context, and load what else the signal reads."""
        self.context = context

    @classmethod
    def is_provided(cls, config: SignalsConfig) -> bool:
        """Whether a recipe with this section can measure it, whatever the environment."""
        return True

    def begin(self) -> None:
        """Start from the policy as it is: called once it is warmed up, and not if a run is resumed."""

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories, none of which failed, with the signal in every turn.

        Rank 0 is given the trajectories, and the others none: they compute what is scattered to them (`score_tokens`), so
        the computation must not depend on what is given.
        """
        raise NotImplementedError

    def fit(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Fit the signal's model to what was measured, which rank 0 is given; return metrics, on all ranks."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, tensors and plain data. Empty: the signal learns nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; settings of learning are the recipe's."""
