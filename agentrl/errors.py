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


class RemoteError(AgentRLError):
    """An error that an environment raised in another process, with its description from there."""

    def __init__(self, line: str, *, kind: str, traceback: str = "", is_resumable: bool = False) -> None:
        """Take the description.

        Args:
            line: error and its location, in one line.
            kind: see `agentrl.types.Fault`, as with the others.
            traceback: the environment's own frames.
            is_resumable: another process may continue the episode.
        """
        super().__init__(line)
        self.kind, self.traceback = kind, traceback
        self.is_resumable = is_resumable


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
