"""The recipe's section `train`."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from agentrl.learn.optimizer import OptimizerName
from agentrl.learn.schedule import ScheduleName
from agentrl.may_change import MayChange
from agentrl.policy.config import Layout
from agentrl.types import Amount, AmountOrZero, Count, Positive, Rate, between

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(BaseModel):
    """The optimizer and what it is fed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[Amount, MayChange(lambda train: train.schedule == "constant", "with `schedule: constant`")] = 100
    """Rounds of collecting and updating."""
    num_minibatches: Count = 4
    """Parts into which each step's rollouts are drawn (the GSPO paper's four): an optimizer update for each, but where one has
    no gradient."""
    max_tokens_per_micro_batch: Annotated[Amount, MayChange()] = 16_384
    """Most tokens in one forward and backward pass, padding included; a token that rows share counts once. A longer
    trajectory is a pass of its own."""
    layout: Annotated[Literal["auto"] | Layout, MayChange()] = "auto"
    """How rows are laid out: `tree` computes what they share once, `packed` puts short ones behind one another, `padded` below
    one another. `auto`: the first of these that is proven exact for the model when the run begins."""
    learning_rate: Rate = 3e-4
    """Step size of AdamW."""
    schedule: ScheduleName = "constant"
    """Course of the learning rate after its warm-up."""
    warmup_minibatches: AmountOrZero = 0
    """Minibatches over which the learning rate rises from 0. Those without a gradient count, here and in the schedule: it is
    then at the same point of each step in any run, and ends with it."""
    target_kl: Positive | None = 0.02
    """How far a step may move the policy, in nats a token: an update that moves it further, at the tokens of the next minibatch
    (the last update: of the last one), is halved until it does not. None: as far as the updates take it. The metric `kl/step`
    is the furthest that minibatches showed, before the last update: 0 with one minibatch. Where tokens are stale, all
    minibatches but the first take a forward pass more."""
    ess_scaling: bool = False
    """Multiply the learning rate of each update by the square root of `ratio/effective_samples` of its minibatch: small where
    few trajectories outweigh the rest, as among stale ones (VCPO)."""
    optimizer: OptimizerName = "adamw"
    """`adamw`: torch's. `adamw_8bit`, `paged_adamw`, `paged_adamw_8bit`: of bitsandbytes, for less memory."""
    gradient_checkpointing: Annotated[bool, MayChange()] = False
    """Keep what enters each layer and compute the rest again in the backward pass: slower, for less memory."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of Adam's running means of the gradient and of its square."""
    weight_decay: Annotated[float, Field(ge=0), between(0, 1e6)] = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: autocast over float32 weights."""
    sharding: Literal["none", "full"] = "none"
    """Where several processes train. `none`: each holds all weights (DDP). `full`: weights, gradients and the optimizer's
    state are shared out among them (FSDP2)."""
    process_timeout_s: Annotated[float, MayChange()] = Field(default=1800.0, gt=0, le=31_536_000)
    """How long a process waits for the others, in seconds; a year at most."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto`: a GPU where there is one."""
    checkpoint_every: Annotated[Amount, MayChange()] = 20
    """Steps between checkpoints; the last step always has one."""
    keep_last: Annotated[Amount, MayChange()] = 2
    """Checkpoints kept."""
    on_collapse: Annotated[Literal["warn", "stop", "rewind"], MayChange()] = "warn"
    """What follows where the policy collapses (metric `health/collapse`). `stop`: the run ends. `rewind`: once, it goes back to
    the newest checkpoint from before, with half the learning rate; at the next collapse it ends. It is told anyway."""
    stop_on: Annotated[tuple[Literal["alike", "cut_off"], ...], MayChange()] = ()
    """Signs (metrics `health/SIGN`) at which the run ends: groups that earn `alike` for 8 steps, every episode `cut_off`. Each
    is told once anyway."""
    agreement: Annotated[Annotated[float, Field(gt=0), between(1e-12, 1)] | None, MayChange()] = None
    """Largest mean difference allowed between the engine's log-probabilities and the trainer's under the same weights, in
    nats. None: follows the precision (float32 1e-3, bfloat16 0.05)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sharding == "full" and self.optimizer != "adamw":
            raise ValueError(f"optimizer: {self.optimizer} cannot be shared out (sharding: full); set it to adamw")
        return self

    def is_shared_out(self, num_processes: int) -> bool:
        """Tell whether weights are shared out: one process alone has them whole, whatever `sharding` is."""
        return self.sharding == "full" and num_processes > 1

    def agreement_bound(self) -> float:
        """Return `agreement`, the precision's default where it is None."""
        return self.agreement or {"float32": 1e-3, "bfloat16": 0.05}[self.precision]
