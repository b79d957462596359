"""Forms without tags: the whole text after a thought is calls, or none of it is."""

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.chat.forms.form import Function, assistant
from agentrl.chat.forms.tagged import END_THINK, THINK
from agentrl.chat.renderer import Tools
from agentrl.plain_data import well_formed
from agentrl.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeForm:
    """A text that begins as a call does is one; any other text is an answer."""

    name: str
    read: Callable[[str], tuple[str, list[Function]]]
    """Takes a text, and returns what of it is content, and the calls."""

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:  # noqa: ARG002 - the calls have types
        """Return the message of a text."""
        text, thought = well_formed(text).strip(), ""
        if is_thinking or text.startswith(THINK):
            thought, _, text = text.removeprefix(THINK).partition(END_THINK)
        content, functions = self.read(text.strip())
        return assistant(content, [thought], functions)

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""
        return text
