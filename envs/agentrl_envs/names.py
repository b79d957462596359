"""Invented names, the same in every process."""

import functools
import itertools

from agentrl_envs.data import read_yaml


@functools.cache
def people() -> tuple[str, ...]:
    """List 4,000 names of people, no two alike."""
    parts = read_yaml("names.yaml")
    product = itertools.product(parts["first"], parts["start"], parts["end"])
    return tuple(f"{first} {start}{end}" for first, start, end in product)


@functools.cache
def titles() -> tuple[str, ...]:
    """List 504 titles, no two alike."""
    parts = read_yaml("names.yaml")
    return tuple(f"{adjective} {noun}" for adjective, noun in itertools.product(parts["adjective"], parts["noun"]))
