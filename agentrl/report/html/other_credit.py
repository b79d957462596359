"""What other credit schemes would have given the same rollouts."""

from collections.abc import Iterator, Sequence

from agentrl.credit import CreditScheme, installed_credit, load_credit
from agentrl.errors import CreditError
from agentrl.report.explain import credits_of
from agentrl.report.html.rollouts import OtherCredit
from agentrl.report.records import TrajectoryRecord, groups_of
from agentrl.types import Need


def other_credit(records: Sequence[TrajectoryRecord]) -> OtherCredit:
    """Credit the rollouts of a step by every installed scheme, with its defaults, that needs no more than was recorded."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    groups = groups_of(records)
    for name, scheme in _schemes(_recorded(records)):
        try:
            credits = credits_of(scheme, groups)
        except CreditError:  # it wants what these lack, such as siblings
            continue
        found[name] = {ids: credit.advantages_T.tolist() for ids, credit in credits.items()}
    return found


def _schemes(recorded: frozenset[Need]) -> Iterator[tuple[str, CreditScheme]]:
    for name, needs in installed_credit().items():
        if needs is not None and needs <= recorded:
            yield name, load_credit({"scheme": name})


def _recorded(records: Sequence[TrajectoryRecord]) -> frozenset[Need]:
    """Return what a scheme finds in every turn."""
    turns = [turn for record in records if not record.stop_reason.failed for turn in record.turns]
    if not turns:
        return frozenset()
    found = {Need.TURN_REWARDS} | frozenset.intersection(*(frozenset(turn.signals) for turn in turns))
    found |= {Need.STATE_KEYS} if all(turn.state_key is not None for turn in turns) else set()
    found |= {Need.ACTION_KEYS} if any(turn.action_key is not None for turn in turns) else set()
    found |= {Need.BRANCHES} if all(turn.branch_rewards is not None for turn in turns) else set()
    return frozenset(found)
