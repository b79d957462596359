"""The recipe's section about rollouts."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.chat.renderer import HistoryConfig
from agentrl.recipe.plugin import MayChange
from agentrl.rollout.group_rewards import GroupReward
from agentrl.rollout.tasks import CurriculumConfig
from agentrl.types import Amount, AmountOrZero, Count, Seconds, between

_MIN_LIVE = 64
"""Episodes played at once, if a step has fewer: evaluations have more."""


class BranchConfig(BaseModel):
    """Rollouts forked from an episode's turns with `env.fork`, played only if the credit scheme reads them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num: Count = 4
    """Rollouts per forked turn."""
    every: Amount = 1
    """Turns from one fork to the next, beginning with the first turn."""
    budget_tokens: Amount = 4096
    """Tokens sampled for one episode's forks after which no other rollout is started. Each turn gets one rollout, then a
    second, and so on."""


class RolloutConfig(BaseModel):
    """Limits, group size and staleness of rollouts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["sync", "partial", "async"] = "sync"
    """`sync`: every episode of a step is awaited before its update. `partial`: a step takes complete groups, the oldest first;
    the other episodes are interrupted, and continue with the next weights. `async`: the same, but sampling
    continues during the update, and is interrupted only while weights are replaced."""
    max_staleness: Amount = 2
    """`partial`, `async`: groups are started at most this many steps ahead; `stale` decides about tokens that were
    sampled more policy versions ago."""
    keep_cache: bool = False
    """`async`, with vLLM's servers: actions under way at a weight sync are not interrupted. They continue under the new weights
    with the keys and values of the old ones, so their later tokens are sampled by neither (`mismatch/difference` with
    `loss.anchor: sampled`). The next action computes its context again."""
    stale: Literal["wait", "mask", "keep"] = "wait"
    """`wait`: a step waits for the groups that would become too old, so that no token is. `mask`: the step does not
    wait; tokens that are too old leave the loss. `keep`: they are trained on. Either way they are counted
    (`staleness/too_old`)."""
    num_groups: Count = 8
    """Tasks for each step."""
    group_size: Count = 8
    """Episodes per task."""
    temperature: Annotated[float, Field(gt=0), between(0.01, 100)] = 1.0
    """Sampling temperature; log-probabilities are those of the tempered distribution, in rollouts and in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must stay 1: a truncated support makes the importance ratio of the tokens cut off undefined."""
    max_turns: Amount = 8
    """Largest number of actions per episode."""
    max_turn_tokens: Amount = 256
    """Largest number of tokens sampled per action."""
    cut_off: Literal["end", "act"] = "end"
    """Consequence of an action that `max_turn_tokens` cuts off. `end`: it is not carried out, and the episode ends. `act`: the
    environment gets what was said; an unfinished call is a malformed one. A model that says much before it has learned to be
    brief earns nothing at all with `end`."""
    max_episode_tokens: Amount = 2048
    """Largest number of tokens sampled per episode."""
    max_context_tokens: Amount = 4096
    """Largest number of tokens in a context, prompt and actions together."""
    history: HistoryConfig = HistoryConfig()
    """Part of the earlier turns that a context shows; by default all."""
    max_live_episodes: Annotated[Count | None, MayChange()] = None
    """Episodes played at once by a rank, each environment on a thread of its own. Null: those of its step, at least 64."""
    env_timeout_s: Annotated[Seconds, MayChange()] = 60.0
    """Deadline of each reset and step of an environment, and of each call of a group reward, in seconds."""
    engine_timeout_s: Annotated[Seconds, MayChange()] = 600.0
    """Deadline of each completion, in seconds. With `engine.lockstep` it includes waiting for the environments of the
    other live episodes: leave it well above `env_timeout_s`."""
    max_retries: Annotated[AmountOrZero, MayChange()] = 2
    """Retries per episode: after a failure of the environment it restarts with a fresh one, after one of the engine or of
    an environment server it resumes."""
    dynamic_sampling: AmountOrZero = 0
    """Largest number of groups per step that are replaced by new tasks because all of their episodes earned the same (DAPO,
    arXiv 2503.14476); further ones are kept. Schemes that compare the returns of siblings learn nothing from such groups;
    schemes that compare turns may; with schemes that read a critic, a judge, a teacher or an answer it is refused."""
    group_rewards: tuple[GroupReward, ...] = ()
    """Rewards that compare the episodes of a group, or count their tokens; added in training only, before credit is assigned.
    `dynamic_sampling` ignores them."""
    curriculum: CurriculumConfig | None = None
    """Rule by which tasks of a table rest for a while. Null: none rest."""
    branches: BranchConfig = BranchConfig()
    """Forked rollouts, for credit schemes that read them."""
    max_consecutive_failures: Annotated[Amount, MayChange()] = 16
    """Number of episodes in a row that failed in spite of their retries, or of groups in a row that had to be replaced, after
    which the run stops with the last error."""

    def live_episodes(self, num_groups: int) -> int:
        """Return the number of episodes that are played at once by a rank with `num_groups` in each step."""
        return self.max_live_episodes or max(_MIN_LIVE, num_groups * self.group_size)

    @property
    def waits_for_all(self) -> bool:
        """True if a step waits for every episode that it has started."""
        return self.mode == "sync"

    @property
    def samples_during_update(self) -> bool:
        """True if episodes continue while the policy is updated."""
        return self.mode == "async"

    @property
    def staleness_bound(self) -> int:
        """Largest number of steps ahead for which groups are started; with `stale: wait`, the largest staleness of a token."""
        return 0 if self.waits_for_all else self.max_staleness

    def repeats_exactly(self, device: str) -> bool:
        """Return whether samples do not depend on the timing of environments, so that a run can repeat bit for bit.

        A GPU (`device`: cuda) would idle until the slowest environment of all answers, and its sums have no fixed order.
        """
        return self.waits_for_all and device != "cuda"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        labels = [reward.label for reward in self.group_rewards]
        if len(set(labels)) < len(labels):
            raise ValueError("group_rewards: two have one name; give one another name")
        if self.top_p != 1:
            raise ValueError(
                f"top_p: {self.top_p} cuts the support off, so importance ratios would be wrong; "
                "train with top_p: 1 and lower the temperature instead"
            )
        if self.waits_for_all and self.stale != "wait":
            raise ValueError(
                f"stale: {self.stale} has nothing to act on with mode: sync; remove it, or set mode: partial"
            )
        if self.keep_cache and not self.samples_during_update:
            raise ValueError(
                f"keep_cache: true interrupts nothing with mode: {self.mode}; remove it, or set mode: async"
            )
        if self.max_turn_tokens > self.max_episode_tokens:
            raise ValueError(
                f"max_turn_tokens: {self.max_turn_tokens} exceeds max_episode_tokens: {self.max_episode_tokens}; lower it"
            )
        return self
