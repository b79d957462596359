"""The exceptions of agentrl.

`UserError` and its children are mistakes that the person at the keyboard can mend: each message names the field or the
method at fault and the fix, and the command line ends with exit status 2 and that message alone.
"""


class AgentRLError(Exception):
    """Base of the exceptions that end a command with a message; misuse of a function is a ValueError or TypeError."""


class UserError(AgentRLError, ValueError):
    """A mistake in what the user gave: a recipe, an environment, a folder."""


class ConfigError(UserError):
    """A recipe or command-line option that cannot be carried out."""


class UnreachableError(ConfigError):
    """A model of a hub that cannot be reached, and that is not in the cache."""


class EnvironmentFailure(UserError):  # noqa: N818  # EnvironmentError is a builtin
    """An environment raised, hung or broke its contract so often that the run was stopped."""


class EnvError(AgentRLError):
    """An environment raised, hung or broke its contract in one episode, which is data: it is played again or left out."""


class RendererError(UserError):
    """A chat template that cannot be used as asked."""


class TemplateLimitError(UserError):
    """A chat template that takes more time or memory than any dialogue needs."""


class CreditError(UserError):
    """A credit scheme was given groups it cannot credit, or returned credit that does not fit them."""


class CheckError(UserError):
    """A conformance check of `agentrl.testing` found something wrong; the message lists all of it."""


class TrainingError(AgentRLError):
    """An update that must not be made."""


class EngineError(AgentRLError):
    """An engine failed to generate, or failed its self-proof."""
