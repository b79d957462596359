"""Whether each option of a credit scheme does anything."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from agentrl.credit import Credit
from agentrl.errors import CreditError
from agentrl.testing.credit_layouts import LONE
from agentrl.testing.credit_subject import Groups, Subject, same
from agentrl.testing.option_values import is_closed, other_values

MAX_BASES = 400
"""Most combinations of a scheme's other options under which an option is tried before it is called idle."""


def idle_options(subject: Subject) -> Iterator[str]:
    """Each option, changed by itself, changes the outcome of some batch under some setting of the others."""
    cls, given = type(subject.scheme), dict(subject.scheme)
    tries = {
        name: list(subject.options.get(name, other_values(info.annotation, given[name])))
        for name, info in cls.model_fields.items()
    }
    discrete = {name: values for name, values in tries.items() if is_closed(cls.model_fields[name].annotation)}
    batches = [subject.groups(), subject.groups(LONE)]
    for name, values in tries.items():
        if not values:
            if not is_closed(cls.model_fields[name].annotation):
                yield f"option {name}: its type tells no other value to try; give some in options={{{name!r}: [...]}}"
            continue
        others = {other: choices for other, choices in discrete.items() if other != name}
        bases = (given | chosen for chosen in itertools.islice(_combinations(others), MAX_BASES))
        if not any(_matters(subject, base, name, values, batches) for base in bases):
            yield f"option {name} changes nothing"


def _combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield all ways to choose for some of the names, those that choose for few names first."""
    for size in range(len(choices) + 1):
        for chosen in itertools.combinations(choices, size):
            for values in itertools.product(*(choices[name] for name in chosen)):
                yield dict(zip(chosen, values, strict=True))


def _matters(
    subject: Subject, base: Mapping[str, Any], name: str, values: Sequence[Any], batches: Sequence[Groups]
) -> bool:
    outcomes = [_outcomes(subject, {**base, name: value}, batches) for value in (base[name], *values)]
    valid = [outcome for outcome in outcomes if outcome is not None]
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and not same(a, b))
        for other in valid[1:]
        for a, b in zip(valid[0], other, strict=True)
    )


def _outcomes(
    subject: Subject, fields: Mapping[str, Any], batches: Sequence[Groups]
) -> list[dict[str, Credit] | None] | None:
    """Credit each batch, None where it is refused; None for all where the fields make no valid scheme."""
    try:
        scheme = type(subject.scheme).model_validate(fields)
    except ValidationError:
        return None
    asked = replace(subject, scheme=scheme)
    found: list[dict[str, Credit] | None] = []
    for batch in batches:
        try:
            found.append(asked.credit(batch))
        except CreditError:
            found.append(None)
    return found
