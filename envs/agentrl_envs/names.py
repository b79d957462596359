"""Invented names, the same in every process; no two of a kind are alike."""

import functools
import itertools

from agentrl_envs.data import read_yaml

_FORMS = {
    "person": "{first} {start}{end}",
    "title": "{adjective} {noun}",
    "city": "{start}{city_end}",
    "country": "{start}{country_end}",
    "company": "{start}{company_end} {company_kind}",
}


@functools.cache
def names(kind: str) -> tuple[str, ...]:
    """List all names of a kind: person (4,000), title (504), city (160), country (60) or company (400)."""
    form, parts = _FORMS[kind], read_yaml("names.yaml")
    fields = [field for field in parts if f"{{{field}}}" in form]
    return tuple(
        form.format(**dict(zip(fields, values, strict=True)))
        for values in itertools.product(*(parts[field] for field in fields))
    )
