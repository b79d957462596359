import itertools
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup
from agentrl.errors import CheckError, ConfigError, CreditError
from agentrl.testing.check_credit import check_credit
from agentrl_credit.turn_gae import TurnGAE
from agentrl_credit.turn_return import TurnReturn
from agentrl_credit.uniform import Uniform
from tests.support.each import each


def lines(scheme: Any, **kind: Any) -> list[str]:
    """Return what check_credit finds wrong, without the bullets."""
    with pytest.raises(CheckError) as caught:
        check_credit(scheme, **kind)
    head, *found = str(caught.value).split("\n- ")
    assert type(scheme).__name__ in head
    return found


@each(
    ("normalize", "lone"),
    list(itertools.product(["std", "none", "leave_one_out", "batch"], ["error", "keep", "drop"])),
)
def test_uniform_passes(normalize: Any, lone: Any) -> None:
    check_credit(Uniform(normalize=normalize, lone=lone))


@pytest.mark.slow
@each(
    ("baseline", "leave_one_out", "normalize"),
    list(itertools.product(["pool", "state", "turn"], [True, False], ["none", "std", "batch"])),
)
def test_turn_return_passes(baseline: Any, leave_one_out: bool, normalize: Any) -> None:
    check_credit(TurnReturn(baseline=baseline, leave_one_out=leave_one_out, normalize=normalize, gamma=0.5))


def test_a_scheme_is_given_as_a_name_a_mapping_or_a_class() -> None:
    check_credit("uniform")
    check_credit({"scheme": "turn_return", "baseline": "turn"})
    check_credit(TurnReturn)
    with pytest.raises(ConfigError, match="Did you mean 'uniform'"):
        check_credit("unifrom")


class Simple(CreditScheme):
    """R - mean; the broken schemes below change one thing of it."""

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [self.group(group) for group in groups]

    def group(self, group: TrajectoryGroup) -> list[Credit]:
        values = self.values([t.reward for t in group.valid])
        by_id = dict(zip([t.trajectory_id for t in group.valid], values, strict=True))
        return [Credit.excluded(t) if t.failed else self.credit(t, by_id[t.trajectory_id]) for t in group.trajectories]

    def values(self, returns: list[float]) -> list[float]:
        mean = fmean(returns) if returns else 0.0
        return [value - mean for value in returns]

    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.uniform(trajectory, advantage)


def test_the_scheme_that_the_broken_ones_start_from_passes() -> None:
    check_credit(Simple())
    check_credit(Simple(), scale_equivariant=True)


class Capped(Simple):
    cap: Annotated[float, Field(gt=0)] | None = None

    def values(self, returns: list[float]) -> list[float]:
        return [
            value if self.cap is None else max(-self.cap, min(self.cap, value)) for value in super().values(returns)
        ]


def test_an_option_may_be_a_number_within_bounds_or_none() -> None:
    check_credit(Capped())


class FirstIsBaseline(Simple):
    def values(self, returns: list[float]) -> list[float]:
        return [value - returns[0] for value in returns]


class Uncentered(Simple):
    def values(self, returns: list[float]) -> list[float]:
        return returns


class BlownUp(Simple):
    def values(self, returns: list[float]) -> list[float]:
        scale = (stdev(returns) if len(returns) > 1 else 0.0) + 1e-30
        return [value / scale for value in super().values(returns)]


class Squared(Simple):
    def values(self, returns: list[float]) -> list[float]:
        return [value * abs(value) for value in super().values(returns)]


class CountsObservations(Simple):
    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.uniform(trajectory, advantage / sum(1 + len(turn.observation_ids) for turn in trajectory.turns))


class PerToken(Simple):
    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.uniform(trajectory, advantage / trajectory.num_action_tokens)


class Slanted(Simple):
    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.from_tokens(trajectory, advantage * np.arange(1, trajectory.num_action_tokens + 1))


class LooksAtNames(Simple):
    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.uniform(trajectory, advantage * (1 + len(trajectory.group_id)))


class TrustsFailures(Simple):
    def group(self, group: TrajectoryGroup) -> list[Credit]:
        values = self.values([t.reward for t in group.trajectories])
        return [self.credit(t, value) for t, value in zip(group.trajectories, values, strict=True)]


class ForgetsFailures(Simple):
    def group(self, group: TrajectoryGroup) -> list[Credit]:
        return super().group(replace(group, trajectories=group.valid))


class MeanOfBatch(Simple):
    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        mean = fmean(t.reward for group in groups for t in group.valid)
        return [
            [Credit.excluded(t) if t.failed else Credit.uniform(t, t.reward - mean) for t in group.trajectories]
            for group in groups
        ]


class IdleOptions(Simple):
    bonus: float = 0.5
    mode: Literal["a", "b"] = "a"
    label: str = ""


class HiddenTurnRewards(Simple):
    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.uniform(trajectory, advantage * (1 + abs(trajectory.turns[0].reward)))


class HiddenStates(Simple):
    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.uniform(trajectory, advantage * (1 + (trajectory.turns[0].state_key == "A")))


class KeysEverywhere(Simple):
    """Asks each action for its key, though one that was cut off has none."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.ACTION_KEYS})

    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        if any(turn.action_key is None for turn in trajectory.turns):
            raise CreditError(f"trajectory {trajectory.trajectory_id}: no action key")
        return Credit.uniform(trajectory, advantage)


class MergesStates(Simple):
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_REWARDS, Need.STATE_KEYS})

    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        place = sum((k + 1) * turn.reward for k, turn in enumerate(trajectory.turns))
        return Credit.uniform(trajectory, advantage * (1 + place**2))


class TurnsEndAtRewards(Simple):
    """Takes a turn for over where a reward is not zero, and pays each of those turns the same."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_REWARDS})

    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        return Credit.uniform(trajectory, advantage * (1 + sum(turn.reward != 0 for turn in trajectory.turns)))


class Forgetful(Simple):
    """Reads the first ten turns."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_REWARDS})

    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        rewards = [turn.reward for turn in trajectory.turns[:10]]
        return Credit.from_turns(trajectory, [sum(rewards[k:]) for k in range(len(trajectory.turns))])


class NotANumber(Simple):
    def values(self, returns: list[float]) -> list[float]:
        return [float("nan") for _ in returns]


class Crashes(Simple):
    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        del groups
        raise KeyError("teacher_logprobs")


class Drifts(Simple):
    calls: ClassVar[list[int]] = []

    def values(self, returns: list[float]) -> list[float]:
        self.calls.append(1)
        return [value * len(self.calls) for value in super().values(returns)]


class NamelessRefusal(Uniform):
    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        if any(len(group.valid) == 1 for group in groups):
            raise CreditError("too few")
        return super().assign(groups)


class KeepsNeedsBack(TurnReturn):
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_REWARDS})

    def requirements(self) -> frozenset[Need]:
        return frozenset({Need.STATE_KEYS}) if self.baseline == "state" else frozenset()


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Uncentered(), {"siblings with equal returns", "adding a constant", "with one turn each"}),
        (BlownUp(), {"siblings with equal returns"}),
        (Squared(), {"with one turn each"}),
        (CountsObservations(), {"the number of observation tokens", "the observation tokens change"}),
        (PerToken(), {"the number of tokens of the actions"}),
        (Slanted(), {"the tokens of one action differ", "the number of tokens of the actions"}),
        (LooksAtNames(), {"the names of groups"}),
        (TrustsFailures(), {"a failed trajectory stays", "a failed trajectory changes"}),
        (ForgetsFailures(), {"a failed trajectory has no entry"}),
        (IdleOptions(), {"option bonus changes nothing", "option mode changes nothing", "option label: its type"}),
        (HiddenTurnRewards(), {"which turn was rewarded", "adding a constant", "with one turn each"}),
        (HiddenStates(), {"state keys change the credit"}),
        (KeysEverywhere(), {"an action that was cut off, and so has no action key, is refused"}),
        (NotANumber(), {"CreditError where credit was expected: credit scheme NotANumber: trajectory oak/0"}),
        (
            Crashes(),
            {"CreditError where credit was expected: credit scheme Crashes raised KeyError: 'teacher_logprobs' ("},
        ),
        (NamelessRefusal(), {"a lone trajectory is refused without naming its group", "option lone changes nothing"}),
        (KeepsNeedsBack(), {"requirements() leaves out turn_rewards", "which turn was rewarded"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_scheme_is_told_all_that_is_wrong_and_nothing_else(scheme: CreditScheme, expected: set[str]) -> None:
    found = lines(scheme)
    for start in expected:
        assert any(line.startswith(start) for line in found), (start, found)
    assert [line for line in found if not line.startswith(tuple(expected))] == []


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (FirstIsBaseline(), "trajectories reversed within their group do not take their credit along"),
        (FirstIsBaseline(), "trajectories rotated within their group do not take their credit along"),
        (MeanOfBatch(), "a group's credit depends on the other groups in the batch"),
        (MergesStates(), "turns without state keys are credited all the same"),
        (TurnsEndAtRewards(), "a reward is credited alike at turns 0 and 1 of twelve"),
        (Forgetful(), "a reward at turn 10, 11 of twelve changes no credit"),
        (Drifts(), "the same groups, credited twice, get different credit"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_scheme_is_told_so(scheme: CreditScheme, expected: str) -> None:
    assert any(line.startswith(expected) for line in lines(scheme))


def test_a_baseline_that_reads_the_own_return_is_no_leave_one_out() -> None:
    # with four trajectories, 3 more for one raises the mean by .75
    [line] = lines(Simple(), leave_one_out=True)
    assert line == "the baseline moves with the trajectory's own return: 3 more reward gives 2.25 more advantage"


class KeepsItsDiscount(TurnGAE):
    def critic_discount(self) -> Any:
        return None


def test_a_discount_that_the_critic_is_not_told_is_found() -> None:
    expected = "the critic does not learn returns under gamma: let critic_discount() return it"
    assert lines(KeepsItsDiscount(), relative=False) == [expected]


def test_a_fixed_bonus_is_not_scale_equivariant() -> None:
    class Bonus(Simple):
        def values(self, returns: list[float]) -> list[float]:
            deviations = super().values(returns)
            return [value / (1 + max(map(abs, deviations), default=0)) for value in deviations]

    check_credit(Bonus())
    assert lines(Bonus(), scale_equivariant=True) == ["twice the rewards do not give twice the advantages"]


def test_what_is_meant_can_be_said() -> None:
    class SlantedOnPurpose(Slanted):
        granularity: ClassVar = "token"

    check_credit(SlantedOnPurpose())
    check_credit(Uncentered(), relative=False, scale_equivariant=True)
    check_credit(Uniform(normalize="batch"), batch_wide=True)
    assert lines(Uniform(normalize="batch"), batch_wide=False) == [
        "a group's credit depends on the other groups in the batch (batch_wide=True where that is meant)"
    ]


class Weighted(Simple):
    """Reads data that the made-up groups do not have, and an option whose type tells no values."""

    weights: str = "1"
    shift: int = Field(default=0, ge=0)

    def credit(self, trajectory: Trajectory, advantage: float) -> Credit:
        weight = float(self.weights) * float(trajectory.turns[0].extras["difficulty"]) + self.shift
        return Credit.uniform(trajectory, advantage * weight)


def test_made_up_groups_can_be_prepared_and_values_of_options_given() -> None:
    def prepare(group: TrajectoryGroup) -> TrajectoryGroup:
        rows = [
            replace(t, turns=tuple(replace(turn, extras={**turn.extras, "difficulty": 2}) for turn in t.turns))
            for t in group.trajectories
        ]
        return replace(group, trajectories=tuple(rows))

    check_credit(Weighted(), prepare=prepare, options={"weights": ["2", "3"]})
    assert lines(Weighted(), prepare=prepare, options={"weights": ["1.0"]}) == ["option weights changes nothing"]
    [line] = lines(Weighted())
    assert line.startswith(
        "CreditError where credit was expected: credit scheme Weighted raised KeyError: 'difficulty' ("
    )


def test_every_option_is_tried_under_settings_of_the_others_that_let_it_act() -> None:
    # ddof acts only where normalize is std or batch, which the configured scheme is not
    check_credit(Uniform(normalize="none"))

    class Dead(Uniform):
        def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
            return Uniform(normalize=self.normalize, eps=self.eps, lone=self.lone).assign(groups)

    assert lines(Dead(normalize="none")) == ["option ddof changes nothing"]
