"""Signals: the numbers that credit schemes read beyond rewards and keys, one file per signal, named as its `Need`.

Each is measured once a step, and only if the scheme asks for it.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from agentrl.learn.signals.base import CriticConfig, Signal, SignalsConfig
from agentrl.types import Need

__all__ = ["CriticConfig", "Signal", "SignalsConfig", "hints", "provided_by", "signal_classes"]


@cache
def signal_classes() -> dict[Need, type[Signal]]:
    """Return the declarations of all files named after a `Need`; the other needs are the environment's to provide."""
    files = {module.name for module in iter_modules(__path__)}
    found = {}
    for need in Need:
        if need in files:
            (found[need],) = (
                value
                for value in vars(import_module(f"{__name__}.{need}")).values()
                if isinstance(value, type) and issubclass(value, Signal) and value is not Signal
            )
    return found


def provided_by(config: SignalsConfig) -> frozenset[Need]:
    """Return the needs that can be measured under a recipe, whatever its environment."""
    return frozenset(need for need, signal in signal_classes().items() if signal.is_provided(config))


def hints() -> dict[Need, str]:
    """Return the field that a recipe must set, for each signal that it does not provide."""
    return {need: signal.hint for need, signal in signal_classes().items() if signal.hint}
