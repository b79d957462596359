"""The renderer of recipes that name none."""

from typing import Any

from agentrl.chat.chatml import ChatMLRenderer
from agentrl.chat.renderer import Renderer
from agentrl.chat.template import TemplateConfig


class AutoConfig(TemplateConfig):
    """The tokenizer's own chat template, with its fields, where there is one; else agentrl's small ChatML form."""

    renderer: str = "auto"

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        """Return the renderer that the tokenizer asks for."""
        return super().build(tokenizer, name=name) if tokenizer.chat_template else ChatMLRenderer(tokenizer)
