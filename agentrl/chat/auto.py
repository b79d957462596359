"""The renderer of recipes that name none."""

from typing import Any

from agentrl.chat.chatml import ChatMLConfig, ChatMLRenderer
from agentrl.chat.renderer import Renderer
from agentrl.chat.template import TemplateConfig


class AutoConfig(TemplateConfig):
    """What is proven to fit the tokenizer: its own chat template, with its fields; without one, agentrl's ChatML form."""

    renderer: str = "auto"

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        """Return the renderer that the tokenizer asks for."""
        if tokenizer.chat_template or self.template:
            return super().build(tokenizer, name=name)
        return ChatMLRenderer(tokenizer, ChatMLConfig(system=self.system, thinking=self.thinking))
