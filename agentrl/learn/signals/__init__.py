"""What credit schemes read beyond rewards and keys: measured once a step, and only where the scheme asks for it."""

from agentrl.learn.signals.config import CriticConfig, SignalsConfig
from agentrl.learn.signals.signals import Signals

__all__ = ["CriticConfig", "Signals", "SignalsConfig"]
