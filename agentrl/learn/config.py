"""Sections `train`, `loss` and `warmup` of a recipe, the schedule of the learning rate, and optimizers by name."""

import math
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib import import_module
from math import log
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from agentrl.errors import ConfigError
from agentrl.learn.loss import CovarianceRule, MismatchLevel
from agentrl.learn.tokens import Aggregation, RatioUnit
from agentrl.policy.config import Layout
from agentrl.recipe import foreign_names
from agentrl.recipe.plugin import MayChange
from agentrl.recipe.registry import suggest
from agentrl.types import Amount, AmountOrZero, Count, Need, Positive, Rate, between

ScheduleName = Literal["constant", "linear", "cosine"]


def make_schedule(name: ScheduleName, optimizer: Optimizer, *, num_warmup: int, num_minibatches: int) -> LambdaLR:
    """Make the schedule of a run of so many minibatches, of which the rate rises over the first."""
    return LambdaLR(optimizer, partial(rate_factor, name=name, num_warmup=num_warmup, num_minibatches=num_minibatches))


def rate_factor(minibatch: int, *, name: ScheduleName, num_warmup: int, num_minibatches: int) -> float:
    """Return the factor of the learning rate of a minibatch, counted from 0.

    A rise from 0 to 1 in a straight line; then 1, a straight line to 0, or half a cosine to 0. Numbers are those of
    `transformers.get_scheduler`, to the last bit; importing that takes seconds.
    """
    if minibatch < num_warmup:
        return minibatch / num_warmup
    if name == "constant":
        return 1.0
    progress = (minibatch - num_warmup) / max(1, num_minibatches - num_warmup)
    if name == "linear":
        return max(0.0, (num_minibatches - minibatch) / max(1, num_minibatches - num_warmup))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
"""`adamw`: torch's, fused. The others are of bitsandbytes. `8bit`: both running means are kept in 8 bits, with one scale for
each 256 of them (arXiv 2110.02861), but for weights of less than 4096 entries. `paged`: the state moves to the CPU's memory
while the GPU's is full; on a CPU nothing is paged, and bitsandbytes warns."""

_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Return an optimizer (an `OptimizerName`) of those parameters that require a gradient.

    Raises:
        ConfigError: if the name does not exist, or the package is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    settings: dict[str, Any] = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
    if name == "adamw":
        return torch.optim.AdamW(trained, **settings, fused=True)
    if name not in _BITSANDBYTES:
        raise ConfigError(f"train.optimizer: there is no {name!r}.{suggest(name, get_args(OptimizerName))}")
    try:
        optimizers = import_module("bitsandbytes").optim
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer: {name} needs bitsandbytes ({error}); pip install 'agentrl[bitsandbytes]', or set it to adamw"
        ) from error
    optimizer: torch.optim.Optimizer = getattr(optimizers, _BITSANDBYTES[name])(trained, **settings)
    return optimizer


class Algorithm(BaseModel):
    """A named setting of the loss, and of what belongs to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    paper: str = ""
    """Number on arXiv, or author and year. Empty: there is none."""
    equation: str
    """Equations, or the section, of the paper."""
    loss: dict[str, Any]
    """Fields of the section `loss`."""
    credit: dict[str, Any] | None = None
    """The section `credit` of a recipe that names no scheme. None: the recipe's own default."""
    train: dict[str, Any] = {}
    """Fields of the section `train`, where the recipe does not give them."""
    differs: str
    """Differences from the paper; `-` if there are none."""


@cache
def algorithms() -> dict[str, Algorithm]:
    """Return all algorithms by name (`algorithms.yaml`)."""
    text = Path(__file__).with_name("algorithms.yaml").read_text(encoding="utf-8")
    return {name: Algorithm(**fields) for name, fields in yaml.safe_load(text).items()}


def algorithm(name: str) -> Algorithm:
    """Return an algorithm by its name.

    Raises:
        ConfigError: if there is none of that name.
    """
    found = algorithms().get(name)
    if found is None:
        raise ConfigError(
            f"loss.algorithm: there is no {name!r}; `agentrl algorithms` lists them."
            f"{foreign_names.of_value('loss', name) or suggest(name, algorithms())}"
        )
    return found


Trust = Literal["none", "fixed", "calibrated", "token", "geometric", "cap", "gate", "kernel", "tv", "kl"]
"""Trust regions: rules that end the push on a token."""
DEFAULT_CLIP: dict[RatioUnit, tuple[float, float]] = {
    "trajectory": (3e-4, 4e-4),
    "turn": (3e-3, 4e-3),
    "version": (3e-3, 4e-3),
    "token": (0.2, 0.27),
}
"""Clip range below and above 1 of each unit: the longer the mean, the closer to 1 its ratio stays."""
_TRUST_CLIP: dict[Trust, tuple[float, float]] = {
    "token": DEFAULT_CLIP["token"],
    "geometric": (-math.expm1(-0.4), math.expm1(0.4)),
    "cap": (1.0, 4.0),
    "tv": (0.15, 0.15),
    "kl": (0.05, 0.05),
}
"""Ranges of the trust regions that look at something else than the unit's ratio, or do not stop it."""
_WITHOUT_RANGE: frozenset[Trust] = frozenset({"none", "calibrated", "gate", "kernel"})


class CalibratedConfig(BaseModel):
    """Ranges that follow the spread of log-ratios, for each staleness."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    clipped: float = Field(default=0.03, ge=0.001, lt=0.5)
    """Share of the tokens of positive, and of negative, advantage that the range is to clip."""
    by_length: bool = False
    """Units of 1, 2 to 7, 8 to 31, ... tokens have ranges of their own."""


_LARGEST_LOG_FACTOR = 80.0
"""float32 ends at e^88."""
Exponent = Annotated[float, Field(gt=0, le=1000)]


class GateConfig(BaseModel):
    """Temperatures of the gate 4 / tau sigmoid(tau (ratio - 1)): the larger, the sooner it closes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    positive: float = Field(default=1.0, gt=0, le=1000)
    """For tokens of positive advantage."""
    negative: float = Field(default=1.05, gt=0, le=1000)
    """For the others."""


class KernelConfig(BaseModel):
    """Exponents c1, c2 of the weight W^c1 exp(c2 (1 - W)) of a unit, W being the product of its tokens' ratios."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    positive: tuple[Exponent, Exponent] = (2.0, 3.0)
    """For tokens of positive advantage."""
    negative: tuple[Exponent, Exponent] = (3.0, 2.0)
    """For tokens of negative advantage."""

    @model_validator(mode="after")
    def _check_largest(self) -> Self:
        for name, (c1, c2) in (("positive", self.positive), ("negative", self.negative)):
            largest = c1 * (log(c1) - log(c2)) - c1 + c2  # log of the weight at W = c1 / c2, where it is largest
            if largest >= _LARGEST_LOG_FACTOR:
                raise ValueError(
                    f"{name}: [{c1:g}, {c2:g}] gives weights of up to e^{largest:.0f}, beyond float32; bring c1 and c2 "
                    "closer together"
                )
        return self


class CovarianceConfig(BaseModel):
    """Restraint on the tokens that lower the entropy most: those whose advantage and log-probability are high together."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rule: CovarianceRule = "clip"
    """`clip` (Clip-Cov): the policy loss gives no gradient to some tokens, drawn from those within `band`. `kl` (KL-Cov):
    the tokens of the highest covariance pay `coefficient` times |log-probability - the anchor's|."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of a minibatch's tokens that it concerns; one token at least."""
    band: tuple[float, float] = (1.0, 5.0)
    """Covariances, (advantage - mean) times (log-probability at sampling - mean), between which `clip` draws."""
    coefficient: Positive = 1.0
    """Weight of the penalty of `kl`. With `anchor: behavior` the engine's rounding decides its sign for tokens that have not
    moved; `anchor: recomputed` keeps that out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.band[0] < self.band[1]:
            raise ValueError(f"band: {list(self.band)} is empty; give the lower bound first")
        for name, rule in (("band", "clip"), ("coefficient", "kl")):
            value = getattr(self, name)
            if self.rule != rule and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}: {value} is only used by rule: {rule}; remove it, or set that")
        return self


class NLLConfig(BaseModel):
    """Imitation beside reinforcement learning: -log pi of tokens, weighed among themselves as `loss.aggregation` says."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    coefficient: Positive = 0.1
    """Weight in the loss."""
    of: Literal["successes", "demonstrations"] = "successes"
    """Tokens to imitate. `successes`: of the minibatch's episodes that report `success`. `demonstrations`: of some of those
    of the section `warmup`, drawn for each update; the warm-up itself may have no steps."""
    batch_size: Count = 16
    """Demonstrations of each update."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.of != "demonstrations" and self.batch_size != type(self).model_fields["batch_size"].default:
            raise ValueError(
                f"batch_size: {self.batch_size} is only used by of: demonstrations; remove it, or set that"
            )
        return self


class LossConfig(BaseModel):
    """The loss section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    algorithm: str = "gspo_token"
    """Name of an algorithm, which sets the fields below that are not given (`agentrl algorithms` lists names and fields).
    `loss: NAME` is short for it."""
    unit: RatioUnit = "trajectory"
    """Tokens that share one importance ratio: `trajectory` (GSPO), `turn`, `version` (runs of one policy version within a turn)
    or `token` (PPO, GRPO)."""
    trust: Trust = "fixed"
    """When a token is pushed no further. `fixed`: its unit's ratio leaves the clip range (PPO, GRPO, GSPO). `token`: its own
    ratio leaves the range of single tokens. `geometric`: so too, and the unit's ratio is made of clipped ones (GMPO). `tv`,
    `kl`: its probability moved by more than the range (DPPO). `calibrated`: its unit's ratio leaves a range that follows how
    far ratios spread. Never: the ratio is capped (`cap`: CISPO), fades by a soft gate (`gate`: SAPO) or as the unit's whole
    probability changes (`kernel`: VESPO), or is left out (`none`: REINFORCE)."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """A ratio below 1 - clip_low stops pushing a token of negative advantage further down; with `tv` and `kl`, a divergence
    above clip_low. None: follows what is clipped (trajectory 3e-4, turn and version 3e-3, token 0.2; `geometric` 0.33, `cap`
    1, `tv` 0.15, `kl` 0.05)."""
    clip_high: float | None = Field(default=None, gt=0)
    """A ratio above 1 + clip_high stops pushing a token of positive advantage further up; with `tv` and `kl`, a divergence
    above clip_high. None: follows what is clipped (trajectory 4e-4, turn and version 4e-3, token 0.27; `geometric` 0.49,
    `cap` 4, `tv` 0.15, `kl` 0.05)."""
    clip_by_length: int | None = Field(default=None, gt=0)
    """Tokens of a unit for which `clip_low` and `clip_high` are meant: those of a unit of n tokens are wider by
    sqrt(clip_by_length / n). For `trust: fixed`. None: the same range at every length."""
    gate: GateConfig | None = None
    """Settings of `trust: gate`. None: its defaults."""
    calibrated: CalibratedConfig | None = None
    """Settings of `trust: calibrated`. None: its defaults."""
    kernel: KernelConfig | None = None
    """Settings of `trust: kernel`. None: its defaults."""
    reject: float | None = Field(default=None, gt=1)
    """A unit whose ratio is above this, or below one over it, leaves the loss whole, but for its part in
    `kl_coefficient`. None: none does."""
    aggregation: Aggregation = "trajectory-mean"
    """Weight of a token: every trajectory weighs the same (`trajectory-mean`), every turn (`turn-mean`), every token
    (`token-mean`), or 1 / (number of trajectories * constant_length) (`constant`)."""
    constant_length: int | None = Field(default=None, gt=0)
    """Tokens by which `aggregation: constant` divides, and no other, in place of each trajectory's own length."""
    anchor: Literal["behavior", "recomputed", "sampled"] = "behavior"
    """Denominator of the ratio: `behavior`, the log-probabilities recorded by the engine at sampling; `recomputed`, the
    trainer's own before the first update on the batch; `sampled`, the trainer's own under the weights that sampled each
    token, so that the ratio holds its staleness, and nothing of the engine."""
    kept_versions: Count = 4
    """Policy versions whose trained weights stay in the host's memory with `anchor: sampled`. Tokens of older ones are compared
    with the engine's log-probabilities (`staleness/unkept`)."""
    mismatch: Literal["off", "truncate", "mask"] = "off"
    """Correction of units on which engine and trainer disagree, if `anchor: recomputed` or `sampled` leaves the engine out
    of the ratio: weigh them by exp(mean of anchor - engine log-probabilities), `truncate`d at the limit, or `mask`ed beyond
    it."""
    mismatch_limit: float = Field(default=2.0, gt=1)
    """Largest weight (and, for `mask`, one over the smallest)."""
    mismatch_level: MismatchLevel = "unit"
    """Tokens whose mismatch is corrected together: by the mean over the ratio's `unit`; each `token` by its own; or by the
    `product` over the trajectory, which is exact and far from 1 on long ones. The latter two whatever the unit."""
    off_policy_limit: float | None = Field(default=None, gt=0)
    """A trajectory whose tokens are less probable now than at sampling, by more nats a token than this in the mean, leaves the
    loss with its tokens of negative advantage (DeepSeek-V3.2). None: none does."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy. 0: none is kept, but for a credit scheme that reads it."""
    kl_estimator: Literal["k2", "k3", "unbiased", "k1_reward"] = "k2"
    """Estimate of that divergence: `k2`, whose gradient is that of KL(policy || reference) for tokens that the policy
    sampled; `k3` (GRPO), whose gradient is that of KL(reference || policy); `unbiased` (DeepSeek-V3.2), k3 weighed by the
    token's ratio; `k1_reward` (PPO for RLHF, RLOO, REINFORCE++), which the credit scheme sees: each turn's reward loses
    kl_coefficient times the sum over its tokens of (log-probability at sampling - the reference's). Metrics and records
    show the environment's own rewards."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy of the tokens' distributions, averaged as `aggregation` says, which is added to the objective:
    above 0 it keeps the policy random."""
    covariance: CovarianceConfig | None = None
    """Restraint on the tokens that lower the entropy most (Clip-Cov, KL-Cov). None: there is none."""
    nll: NLLConfig | None = None
    """Imitation of successful episodes or of demonstrations, beside the policy loss. None: there is none."""
    distill_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the model that `signals.teacher` names (estimated as k2). 0: none, and no teacher is
    needed. The credit scheme `distill` learns from the teacher alone."""
    routing_replay: Literal["none", "trainer", "engine"] = "none"
    """Experts that the updates of a mixture use: those that it chooses itself; those of the `trainer` before the first update
    (Routing Replay, GSPO paper, section 5.3); or those of the `engine` at sampling (arXiv 2510.11370), if it returns them:
    `transformers`, and vLLM on a GPU. Ratios of `unit: token` need it by the GSPO paper, those of trajectories do not."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Fill in the fields of the algorithm that are not given; a name alone is short for its mapping."""
        if isinstance(given, str):
            given = {"algorithm": given}
        if not isinstance(given, Mapping):
            return given
        name = given.get("algorithm", cls.model_fields["algorithm"].default)
        if not isinstance(name, str):
            return given
        preset = dict(algorithm(name).loss)
        if any(given.get(field, preset[field]) != preset[field] for field in ("unit", "trust")):
            preset = {field: value for field, value in preset.items() if field not in ("clip_low", "clip_high")}
        if given.get("aggregation", preset["aggregation"]) != preset["aggregation"]:
            preset.pop("constant_length", None)
        return {**preset, **given}

    @model_validator(mode="after")
    def _check_constant_length(self) -> Self:
        if self.aggregation == "constant" and self.constant_length is None:
            raise ValueError("aggregation: constant needs constant_length, the number of tokens to divide by: set it")
        if self.aggregation != "constant" and self.constant_length is not None:
            raise ValueError(
                f"constant_length: {self.constant_length} is only used by aggregation: constant, got aggregation: "
                f"{self.aggregation}; remove constant_length or set aggregation: constant"
            )
        return self

    @model_validator(mode="after")
    def _check_trust(self) -> Self:
        if not self.has_range and not (self.clip_low is None and self.clip_high is None):
            raise ValueError(f"clip_low and clip_high: trust: {self.trust} has no range; remove them")
        for name, value in (("calibrated", self.calibrated), ("gate", self.gate), ("kernel", self.kernel)):
            if value is not None and self.trust != name:
                raise ValueError(f"{name}: is only used by trust: {name}, got trust: {self.trust}; remove one of them")
        if self.clip_by_length is not None and (self.trust != "fixed" or self.unit == "token"):
            raise ValueError(
                f"clip_by_length: {self.clip_by_length} is only used by trust: fixed with a unit of several tokens, got "
                f"trust: {self.trust} and unit: {self.unit}; remove it, or change these"
            )
        return self

    @model_validator(mode="after")
    def _check_mismatch(self) -> Self:
        if self.mismatch != "off" and self.anchor == "behavior":
            raise ValueError(
                f"mismatch: {self.mismatch} corrects what anchor: behavior has in its ratio already; "
                "set anchor: recomputed or sampled, or mismatch: 'off'"
            )
        return self

    @model_validator(mode="after")
    def _check_unused(self) -> Self:
        for name, is_used, users in (
            ("kept_versions", self.anchor == "sampled", "anchor: sampled"),
            ("mismatch_limit", self.mismatch != "off", "mismatch: truncate or mask"),
            ("mismatch_level", self.mismatch != "off", "mismatch: truncate or mask"),
            ("kl_estimator", self.kl_coefficient > 0, "kl_coefficient above 0"),
        ):
            value = getattr(self, name)
            if not is_used and value != type(self).model_fields[name].default:  # a run's recipe has all defaults
                shown = f"{value:g}" if isinstance(value, float) else value
                raise ValueError(f"{name}: {shown} is only used by {users}; remove it, or set that")
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        if self.routing_replay == "trainer" and self.anchor == "behavior":
            raise ValueError(
                "routing_replay: trainer takes the trainer's experts, and anchor: behavior compares with the engine's; set "
                "anchor: recomputed or sampled, or routing_replay: engine"
            )
        return self

    @property
    def has_kl_reward(self) -> bool:
        """Whether rewards lose the divergence from the reference before they are credited."""
        return self.kl_coefficient > 0 and self.kl_estimator == "k1_reward"

    @property
    def has_kl_loss(self) -> bool:
        """Whether the divergence from the reference is a term of the loss."""
        return self.kl_coefficient > 0 and self.kl_estimator != "k1_reward"

    @property
    def reads_demonstrations(self) -> bool:
        """Whether a term of the loss imitates demonstrations."""
        return self.nll is not None and self.nll.of == "demonstrations"

    @property
    def is_dense(self) -> bool:
        """Whether every token may have a gradient, whatever its advantage."""
        has_penalty = self.covariance is not None and self.covariance.rule == "kl"
        return self.has_kl_loss or self.distill_coefficient > 0 or self.entropy_coefficient != 0 or has_penalty

    def needs(self) -> frozenset[Need]:
        """Return the signals that are measured for the loss, whatever the credit scheme reads."""
        reads = {Need.REFERENCE_LOGPROBS: self.has_kl_reward, Need.TEACHER_LOGPROBS: self.distill_coefficient > 0}
        return frozenset(need for need, is_read in reads.items() if is_read)

    def clip_range(self) -> tuple[float, float]:
        """Return (clip_low, clip_high), with the default of what is clipped for a field that is None."""
        low, high = _TRUST_CLIP.get(self.trust, DEFAULT_CLIP[self.unit])
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def has_range(self) -> bool:
        """Whether `clip_low` and `clip_high` mean something."""
        return self.trust not in _WITHOUT_RANGE

    def describe(self) -> str:
        """Describe the algorithm in a phrase: `grpo: token ratios, clip [0.8, 1.2], trajectory-mean`."""
        low, high = self.clip_range()
        clip = f"clip [{1 - low:.4g}, {1 + high:.5g}]"
        regions: dict[Trust, str] = {
            "none": "no ratio and no clip",
            "fixed": clip if self.clip_by_length is None else f"{clip} at {self.clip_by_length} tokens",
            "calibrated": f"calibrated clip of {100 * (self.calibrated or CalibratedConfig()).clipped:g} % of tokens",
            "token": clip if self.unit == "token" else f"token-level {clip}",
            "geometric": f"of ratios clipped to [{1 - low:.4g}, {1 + high:.4g}]",
            "cap": f"ratio within [{1 - low:.4g}, {1 + high:.4g}]",
            "gate": "soft gate",
            "kernel": "VESPO kernel",
            "tv": f"total variation up to {low:g} and {high:g}",
            "kl": f"divergence up to {low:g} and {high:g}",
        }
        units = {"trajectory": "one ratio per trajectory", "token": "token ratios"}
        unit = units.get(self.unit, f"{self.unit} ratios")
        return (
            f"{self.algorithm}: {f'{unit}, ' if self.trust != 'none' else ''}{regions[self.trust]}, {self.aggregation}"
        )

    def warnings(self, *, staleness_bound: int = 0) -> list[str]:
        """List settings that are allowed but likely mistakes: too few kept versions, or the clip bound of another unit.

        Args:
            staleness_bound: policy versions that a token may be behind.
        """
        found = []
        if self.anchor == "sampled" and staleness_bound > self.kept_versions:
            found.append(
                f"loss.kept_versions: {self.kept_versions} is too few for rollout.max_staleness: {staleness_bound}: older "
                "tokens are compared with the engine's log-probabilities, noise included; set it to "
                f"{staleness_bound}, or lower max_staleness"
            )
        has_unit_range = self.trust in ("fixed", "token") and self.clip_by_length is None
        for side, name, value in ((0, "clip_low", self.clip_low), (1, "clip_high", self.clip_high)):
            if value is None or not has_unit_range:
                continue
            own = DEFAULT_CLIP["token" if self.trust == "token" else self.unit][side]
            others = {unit: bounds[side] for unit, bounds in DEFAULT_CLIP.items() if bounds[side] != own}
            if any(own < bound <= value or value <= bound < own for bound in others.values()):
                nearest = min(others.values(), key=lambda bound: abs(log(value / bound)))
                units = " or ".join(unit for unit, bound in others.items() if bound == nearest)
                is_token = self.trust == "token" and self.unit != "token"
                looked_at, change = (
                    ("trust: token looks at tokens", "set trust: fixed")
                    if is_token
                    else (f"unit is {self.unit}", "change unit")
                )
                found.append(
                    f"{name}: {value:g} is a range for unit: {units}, but {looked_at}, whose ratios call for "
                    f"about {own:g}; remove {name} to use that, or {change}"
                )
        return found


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(BaseModel):
    """The optimizer, its minibatches and passes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[Amount, MayChange(lambda train: train.schedule == "constant", "with `schedule: constant`")] = 100
    """Rounds of collecting and updating."""
    num_minibatches: Count = 4
    """Parts into which each step's rollouts are drawn (the GSPO paper's four): an optimizer update for each that has a
    gradient."""
    epochs: Count = 1
    """Times that a step goes over its rollouts (PPO's epochs), each time in `num_minibatches` minibatches of its own. Ratios
    compare with the policy before the first of them; with `loss.anchor: recomputed` or `sampled` every epoch takes a forward
    pass more."""
    max_tokens_per_micro_batch: Annotated[Amount, MayChange()] = 16_384
    """Most tokens in one forward and backward pass, padding included; a token that rows share counts once. A longer
    trajectory is a pass of its own."""
    layout: Annotated[Literal["auto"] | Layout, MayChange()] = "auto"
    """Layout of rows: `tree` computes shared prefixes once, `packed` concatenates short rows, `padded` stacks them. `auto`:
    the first of these that is proven exact for the model when the run begins."""
    learning_rate: Rate = 3e-4
    """Step size of AdamW. With a pretrained model 1e-6, with adapters 1e-5, unless it is given: right for billions of
    parameters; models of fewer learn faster at ten times as much."""
    schedule: ScheduleName = "constant"
    """Course of the learning rate after its warm-up."""
    warmup_minibatches: AmountOrZero = 0
    """Minibatches over which the learning rate rises from 0. Those without a gradient count, here and in the schedule: it is
    then at the same point of each step in any run, and ends with it."""
    target_kl: Positive | None = None
    """Largest KL divergence of a step, in nats a token: an update that exceeds it, at the tokens of the next minibatch, is
    halved until it does not. None: no bound. The last update is measured at a sample of the first minibatch, an eighth of the
    step's tokens; if tokens are stale and `loss.anchor` is `behavior`, the others at an eighth of the next minibatch. The
    metric `kl/step` is the largest divergence before the last update: 0 with one minibatch."""
    ess_scaling: bool = False
    """Multiply the learning rate of each update by the square root of `ratio/effective_samples` of its minibatch: small if
    few trajectories outweigh the rest, as among stale ones (VCPO)."""
    optimizer: OptimizerName = "adamw"
    """`adamw`: torch's. `adamw_8bit`, `paged_adamw`, `paged_adamw_8bit`: of bitsandbytes, for less memory."""
    gradient_checkpointing: Annotated[bool | Annotated[int, Field(ge=2)], MayChange()] = False
    """Keep the inputs of each layer and compute the rest again in the backward pass: slower, for less memory. A number: of
    every n-th layer, from 2 on."""
    compile: Annotated[Literal["none", "layers"], MayChange()] = "none"
    """`layers`: each layer of the model is compiled by itself (`torch.compile`), which takes minutes at the first passes; a
    tree's attention stays outside of its graphs. Not with `sharding: full`."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of Adam's running means of the gradient and of its square."""
    weight_decay: Annotated[float, Field(ge=0), between(0, 1e6)] = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: autocast over float32 weights."""
    bfloat16_copy: Annotated[bool, MayChange()] = False
    """With `precision: bfloat16`, passes compute with a copy of the weights that is rounded once for a minibatch, in place of
    each weight for each pass; hidden states are bfloat16 between layers too, as they are with shards and adapters anyway.
    Fewer kernels and smaller activations; for whole weights, 1.4 to 1.8 times the rounding error."""
    sharding: Literal["none", "full"] = "none"
    """Sharding over ranks. `none`: each holds all weights (DDP). `full`: weights, gradients and the optimizer's state are
    sharded (FSDP2)."""
    replicas: Count = 1
    """Groups of consecutive ranks over each of which weights are sharded (HSDP), with `sharding: full`. As many as machines:
    weights are gathered within a machine, and gradients alone cross the network."""
    offload: Annotated[tuple[Literal["optimizer", "weights"], ...], MayChange()] = ()
    """State that waits in the host's memory, pinned if the device is a GPU; results are the same to the last bit. `optimizer`:
    moments, which come back for each weight's part of an update alone. `weights`: those of policy and reference while episodes
    are sampled; useful with `engine.sleep`, or an engine that is not vLLM."""
    process_timeout_s: Annotated[float, MayChange()] = Field(default=1800.0, gt=0, le=31_536_000)
    """Longest wait of a rank for the others, in seconds; a year at most."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto`: a GPU if there is one."""
    checkpoint_every: Annotated[Amount, MayChange()] = 20
    """Steps between checkpoints; the last step always has one."""
    keep_last: Annotated[Amount, MayChange()] = 2
    """Newest checkpoints kept; the one with the best evaluation is kept beside them."""
    on_collapse: Annotated[Literal["warn", "stop", "rewind"], MayChange()] = "warn"
    """Reaction to a collapse of the policy (metric `health/collapse`). `stop`: the run ends. `rewind`: once, it goes back to
    the newest checkpoint from before, with half the learning rate; at the next collapse it ends. Each logs a warning."""
    stop_on: Annotated[tuple[Literal["zero_spread", "cut_off"], ...], MayChange()] = ()
    """Signs (metrics `health/SIGN`) at which the run ends: for 8 steps no group had a spread of returns (`zero_spread`), or
    every episode was cut off (`cut_off`). Each is logged once anyway."""
    agreement: Annotated[Annotated[float, Field(gt=0), between(1e-12, 1)] | None, MayChange()] = None
    """Largest mean difference allowed between the engine's log-probabilities and the trainer's under the same weights, in
    nats. None: follows the precision (float32 1e-3, bfloat16 0.1, and six times the trainer's own rounding error if that is
    more)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sharding == "full" and self.optimizer != "adamw":
            raise ValueError(f"optimizer: {self.optimizer} cannot be sharded (sharding: full); set it to adamw")
        if self.sharding == "full" and self.compile == "layers":
            raise ValueError("compile: layers and sharding: full were never tried together; set one of them to none")
        if self.bfloat16_copy and self.precision == "float32":
            raise ValueError(
                "bfloat16_copy: there is none in float32; set precision: bfloat16, or bfloat16_copy to false"
            )
        if self.replicas > 1 and self.sharding == "none":
            raise ValueError(f"replicas: {self.replicas} are of shards; set sharding: full, or remove replicas")
        if "optimizer" in self.offload and self.optimizer != "adamw":
            raise ValueError(
                f"offload: optimizer: {self.optimizer} keeps its own; set it to adamw, or take it out of offload"
            )
        return self

    @property
    def minibatches_a_step(self) -> int:
        """Minibatches of a step, of all epochs."""
        return self.epochs * self.num_minibatches

    def is_sharded(self, num_processes: int) -> bool:
        """Return whether weights are sharded: a single rank has them whole, whatever `sharding` is."""
        return self.num_shards(num_processes) > 1

    def num_shards(self, num_processes: int) -> int:
        """Return the number of ranks over which each weight is sharded.

        Raises:
            ConfigError: if `replicas` leaves a rank over, or nothing to shard.
        """
        if self.sharding == "none" or num_processes == 1:
            return 1
        if num_processes % self.replicas or num_processes == self.replicas > 1:
            raise ConfigError(
                f"train.replicas: {self.replicas} groups of at least 2 ranks cannot be made of {num_processes}; set it to a "
                "smaller divisor of their number"
            )
        return num_processes // self.replicas

    def agreement_bound(self, rounding_error: float = 0.0) -> float:
        """Return `agreement`, or the precision's default if it is None.

        Args:
            rounding_error: mean error of the trainer's own log-probabilities, in nats. The engine's is up to three times as
                large (benchmarks/agreement.py), and larger where rounding changes the experts that a mixture chooses.
        """
        if self.agreement is not None:
            return self.agreement
        return max({"float32": 1e-3, "bfloat16": 0.1}[self.precision], _ROUNDING_ERRORS * rounding_error)


_ROUNDING_ERRORS = 6.0


class WarmupConfig(BaseModel):
    """Supervised training before reinforcement learning, on demonstrations of the environment's `oracle()` or on a file.

    A pretrained model that never writes a call needs a short one. Its defaults are others (`PRETRAINED_WARMUP`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: AmountOrZero = 0
    """Optimizer steps; 0: no warm-up. With `dialogues`: 20."""
    dialogues: Path | None = None
    """A file of dialogues to imitate in place of the environment's oracle: JSONL, each line `{"messages": [...]}` in OpenAI's
    form, maybe with `"tools": [...]`, else those of the environment. For pretrained models."""
    batch_size: Count = 16
    """Demonstrations per step. With a pretrained model: 8."""
    num_demonstrations: Count = 2048
    """Demonstrations that the oracle plays; they are gone through again when they run out. With a pretrained model: 256."""
    learning_rate: Rate = 1e-3
    """Step size of AdamW; rises over the first tenth of the steps (at most 20), falls over the last quarter (at most 50). With
    a pretrained model: 2e-5, with adapters 2e-4."""
    skill: float = Field(default=1.0, ge=0, le=1)
    """Share of turns that the demonstrations play right: a policy that was shown perfection has no spread to learn from."""


PRETRAINED_WARMUP: dict[str, Any] = {"batch_size": 8, "num_demonstrations": 256, "learning_rate": 2e-5}
"""Defaults of the section `warmup` with a pretrained model: it has to learn a form, not a language."""
PRETRAINED_RATE = 1e-6
"""Learning rate of a pretrained model's whole weights, where a recipe leaves it open."""
ADAPTER_RATE = 10.0
"""Learning rate of adapters over that of whole weights, where a recipe leaves it open."""
