"""The seam between messages and tokens."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.chat.description import Tried
from agentrl.chat.thinking import Thinking
from agentrl.plugin import Plugin, Seam
from agentrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]


class Renderer(Protocol):
    """Turns messages into the tokens a model reads, and sampled tokens into a message.

    `start` and `extend` are called from many threads at once. A method `describe() -> Description`, where there is one, tells
    `agentrl chat` what there is to say, and what a run says when it begins.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""

    @property
    def max_token_chars(self) -> int | None:
        """Longest text that one token stands for, in characters. None: not known.

        Messages of more text than so many times the limit of a context are refused before they are rendered.
        """

    @property
    def thinking(self) -> Thinking:
        """Which thoughts of earlier turns a context holds. Where one is dropped, `start` renders what is left."""

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context, from the first message to the generation prompt."""

    def extend(
        self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Return the tokens to append after `context_ids + action_ids`: what closes the turn, messages, generation prompt.

        None: the template rewrites history and cannot extend; the caller renders everything again with `start`.
        """

    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        """Return the assistant message of sampled tokens; never raises, a malformed call is data.

        Args:
            action_ids: what was sampled.
            context_ids: what it was sampled in: its end may have opened a thought. Empty: as after a user's message.
            tools: what may be called: their schemas give types to arguments that are written as text alone.
        """

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return the tokens of an assistant message as an action, its stop token included (for demonstrations)."""


class RendererConfig(Plugin):
    """How messages become tokens; the fields of the renderer that it names stand beside the name."""

    seam = Seam("agentrl.renderers", "chat", "renderer")

    renderer: str = "auto"
    """An installed renderer, or `module:Class` of a `RendererConfig`. `template`: the tokenizer's own chat template.
    `chatml`: agentrl's small ChatML form, for models made locally. `auto`: where the tokenizer has
    one, what the package `renderers` makes of it, if that is installed and proven to write the same, else `template`; without
    a template `chatml`."""

    @abstractmethod
    def build(self, tokenizer: "PreTrainedTokenizerBase", *, name: str = "") -> Renderer:
        """Return the renderer of a tokenizer.

        Args:
            tokenizer: of the policy.
            name: of the model, for error messages.

        Raises:
            RendererError: when it cannot be used with this tokenizer; the message names the field and the fix.
        """
        raise NotImplementedError

    def tried(self, tokenizer: "PreTrainedTokenizerBase", *, name: str = "") -> Iterator[Tried]:
        """Yield what is considered in its order; the last is what `build` returns.

        Raises:
            RendererError: as `build`.
        """
        yield Tried(self.renderer, "the recipe names it (chat.renderer)", self.build(tokenizer, name=name))

    def exported_template(self, tokenizer: "PreTrainedTokenizerBase") -> str | None:
        """Return the chat template with which other programs render the dialogues of a model. None: there is none."""
        return own_template(tokenizer)


def own_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the chat template that a tokenizer brings; of several the one with tools. None: it has none."""
    template = tokenizer.chat_template
    return template.get("tool_use") or template.get("default") if isinstance(template, dict) else template
