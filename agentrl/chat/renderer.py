"""The seam between messages and tokens."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from agentrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]


class Renderer(Protocol):
    """Turns messages into the tokens a model reads, and sampled tokens into a message.

    `start` and `extend` are called from many threads at once.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""

    @property
    def max_token_chars(self) -> int | None:
        """Longest text that one token stands for, in characters. None: not known.

        Messages of more text than so many times the limit of a context are refused before they are rendered.
        """

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context, from the first message to the generation prompt."""

    def extend(
        self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Return the tokens to append after `context_ids + action_ids`: what closes the turn, messages, generation prompt.

        None: the template rewrites history and cannot extend; the caller renders everything anew with `start`.
        """

    def parse(self, action_ids: Sequence[int]) -> Message:
        """Return the assistant message of sampled tokens; never raises, a malformed call is data."""

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return the tokens of an assistant message as an action, its stop token included (for demonstrations)."""


class ChatConfig(BaseModel):
    """How messages become tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    renderer: Literal["auto", "chatml", "template"] = "auto"
    """`template`: the tokenizer's own chat template. `chatml`: agentrl's small ChatML form, for models made locally.
    `auto`: `template` where the tokenizer has one, else `chatml`."""
    rewritten_history: Literal["error", "restart"] = "error"
    """What to do with a chat template that changes earlier turns. `error`: refuse it. `restart`: render the whole
    dialogue again at each turn; every turn is then trained in the context in which it was sampled, as a row of its own.
    A template that drops thoughts only when a user speaks (Qwen3's) is rendered again only there."""
    date: dt.date = dt.date(2026, 1, 1)
    """What a chat template that asks for the time (`strftime_now`) is told: midnight of this day. Fixed, so that a dialogue
    is the same tokens on every day of a run, after a restart, and in the next run of the recipe."""


def load_renderer(
    tokenizer: "PreTrainedTokenizerBase", config: ChatConfig, *, name_or_path: str | Path = ""
) -> Renderer:
    """Build the renderer that a recipe asks for, probing a chat template before anything is sampled with it.

    Raises:
        RendererError: when the template cannot be used; the message names the field and the fix.
    """
    from agentrl.chat.chatml import ChatMLRenderer
    from agentrl.chat.template import TemplateRenderer

    if config.renderer == "template" or (config.renderer == "auto" and tokenizer.chat_template):
        return TemplateRenderer(
            tokenizer, rewritten_history=config.rewritten_history, date=config.date, name=str(name_or_path)
        )
    return ChatMLRenderer(tokenizer)
