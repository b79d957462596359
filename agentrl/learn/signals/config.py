"""The recipe's section about what credit schemes read beyond rewards and keys."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from agentrl.may_change import MayChange
from agentrl.types import Amount, AmountOrZero, Count, Rate, Seconds


class CriticConfig(BaseModel):
    """A value for each token's context, learned beside the policy by regression on what followed."""

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
    """Where the numbers come from that some credit schemes read; nothing here costs anything until a scheme asks."""

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
    """How often a call of the judge that raised or hung is made again before the run stops."""
    judge_threads: Annotated[Count, MayChange()] = 8
    """Calls of the judge at the same time."""
