"""A renderer."""

from collections.abc import Sequence
from typing import Any

from agentrl import Message
from agentrl.chat import ChatMLRenderer, Renderer, RendererConfig


class PrefaceConfig(RendererConfig):
    """ChatML behind a preface of the recipe's own."""

    renderer: str = "preface"
    preface: str = "Be brief."

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        return PrefaceRenderer(tokenizer, self.preface)


class PrefaceRenderer(ChatMLRenderer):
    """`start` puts the preface before all messages."""

    def __init__(self, tokenizer: Any, preface: str) -> None:
        super().__init__(tokenizer)
        self.preface = preface

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        return super().start([{"role": "system", "content": self.preface}, *messages], tools)
