"""The recipe's section about rollouts."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.chat.renderer import HistoryConfig
from agentrl.recipe.plugin import MayChange
from agentrl.rollout.group_rewards import GroupReward
from agentrl.rollout.tasks import CurriculumConfig
from agentrl.types import Amount, AmountOrZero, Count, Seconds, between


class BranchConfig(BaseModel):
    """Rollouts forked from an episode's turns with `env.fork`, played only where the credit scheme reads them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num: Count = 4
    """Rollouts for each turn that is forked."""
    every: Amount = 1
    """Fork every so many turns, beginning with the first."""
    budget_tokens: Amount = 4096
    """Tokens sampled for one episode's forks after which no other rollout is started. One rollout a turn, then a second, and so
    on."""


class RolloutConfig(BaseModel):
    """How episodes are played."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["sync", "partial", "async"] = "sync"
    """`sync`: every episode of a step is awaited before its update. `partial`: a step takes complete groups, the oldest first;
    the other episodes are interrupted, and continue under the next weights. `async`: the same, but sampling
    continues during the update, and is interrupted only while weights are replaced."""
    max_staleness: Amount = 2
    """`partial`, `async`: groups are started for at most this many steps ahead, and `stale` says what becomes of tokens
    that were sampled more policy versions ago than this."""
    stale: Literal["wait", "mask", "keep"] = "wait"
    """`wait`: a step waits for the groups that would become too old, so that no token is. `mask`: the step does not
    wait; tokens that are too old leave the loss. `keep`: they are trained on. Either way they are counted
    (`staleness/too_old`)."""
    num_groups: Count = 8
    """Tasks for each step."""
    group_size: Count = 8
    """Episodes that start from the same task."""
    temperature: Annotated[float, Field(gt=0), between(0.01, 100)] = 1.0
    """Sampling temperature; log-probabilities are those of the tempered distribution, in rollouts and in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must stay 1: a truncated support makes the importance ratio of the tokens cut off undefined."""
    max_turns: Amount = 8
    """Largest number of actions of an episode."""
    max_turn_tokens: Amount = 256
    """Largest number of tokens sampled for one action."""
    max_episode_tokens: Amount = 2048
    """Largest number of tokens sampled in an episode."""
    max_context_tokens: Amount = 4096
    """Largest number of tokens in a context, prompt and actions together."""
    history: HistoryConfig = HistoryConfig()
    """How much of earlier turns a context shows; by default all."""
    max_live_episodes: Annotated[Count, MayChange()] = 64
    """Episodes that are kept going at the same time, each environment on a thread of its own."""
    env_timeout_s: Annotated[Seconds, MayChange()] = 60.0
    """Deadline of each reset and each step of an environment, and of each call of a group reward, in seconds."""
    engine_timeout_s: Annotated[Seconds, MayChange()] = 600.0
    """Deadline of each completion, in seconds. With `engine.lockstep` it includes waiting for the environments of the
    other live episodes: leave it well above `env_timeout_s`."""
    max_retries: Annotated[AmountOrZero, MayChange()] = 2
    """How often an episode is restarted, with a fresh environment, after its environment failed, or resumes from where it
    stood after its engine did."""
    dynamic_sampling: AmountOrZero = 0
    """Most groups of a step that are replaced by new tasks because all of their episodes earned the same, which teaches
    nothing to a scheme that compares the returns of siblings (DAPO, arXiv 2503.14476); beyond that many, such groups are kept.
    Schemes that compare turns may have learned from them; with those that read a critic, a judge, a teacher or an answer it
    is refused."""
    group_rewards: tuple[GroupReward, ...] = ()
    """Rewards that compare the episodes of a group, or count their tokens; in training alone, added before credit is assigned.
    `dynamic_sampling` looks at the rewards without them."""
    curriculum: CurriculumConfig | None = None
    """Which tasks of a table rest for a while. Null: none."""
    branches: BranchConfig = BranchConfig()
    """Forked rollouts, for credit schemes that read them."""
    max_consecutive_failures: Annotated[Amount, MayChange()] = 16
    """After so many episodes in a row that failed in spite of their retries, or so many groups in a row that had to be
    replaced, the run stops with the last error."""

    @property
    def waits_for_all(self) -> bool:
        """True where a step ends no sooner than every episode that it has started."""
        return self.mode == "sync"

    @property
    def samples_during_update(self) -> bool:
        """True where episodes are continued while the policy is updated."""
        return self.mode == "async"

    @property
    def staleness_bound(self) -> int:
        """Steps ahead for which groups are started: with `stale: wait`, the most versions that a token is behind."""
        return 0 if self.waits_for_all else self.max_staleness

    @property
    def repeats_exactly(self) -> bool:
        """True where a run can come out bit for bit again: what is sampled does not depend on the timing of environments."""
        return self.waits_for_all

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
        if self.max_turn_tokens > self.max_episode_tokens:
            raise ValueError(
                f"max_turn_tokens: {self.max_turn_tokens} exceeds max_episode_tokens: {self.max_episode_tokens}; lower it"
            )
        return self
