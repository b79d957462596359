"""A short supervised phase before reinforcement learning: the recipe's section `warmup:`."""

from pydantic import BaseModel, ConfigDict, Field

from agentrl.types import AmountOrZero, Count, Rate


class WarmupConfig(BaseModel):
    """Supervised training on `oracle()` demonstrations before reinforcement learning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: AmountOrZero = 0
    """Optimizer steps; 0: no warm-up."""
    batch_size: Count = 16
    """Demonstrations for each step."""
    num_demonstrations: Count = 2048
    """Demonstrations made; they are gone through again when they run out."""
    learning_rate: Rate = 1e-3
    """Step size of AdamW; rises over 20 steps, falls over the last 50."""
    skill: float = Field(default=1.0, ge=0, le=1)
    """Share of turns that the demonstrations play right: a policy that was shown perfection has no spread to learn from."""
