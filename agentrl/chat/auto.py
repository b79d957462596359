"""The renderer of recipes that name none."""

from collections.abc import Iterator
from typing import Any

from agentrl.chat.chatml import ChatMLConfig, ChatMLRenderer
from agentrl.chat.description import Tried
from agentrl.chat.renderer import Renderer
from agentrl.chat.template import TemplateConfig


class AutoConfig(TemplateConfig):
    """What is proven to fit the tokenizer: its own chat template, with its fields; without one, agentrl's ChatML form."""

    renderer: str = "auto"

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        """Return the renderer that the tokenizer asks for."""
        return next(tried.renderer for tried in self.tried(tokenizer, name=name) if tried.renderer is not None)

    def tried(self, tokenizer: Any, *, name: str = "") -> Iterator[Tried]:
        """Yield what is considered in its order; the last is what `build` returns."""
        if tokenizer.chat_template or self.template:
            whose = "chat.template names a chat template" if self.template else "the tokenizer has a chat template"
            yield Tried("template", whose, super().build(tokenizer, name=name))
            return
        yield Tried("template", "the tokenizer has no chat template, and chat.template names none")
        config = ChatMLConfig(system=self.system, thinking=self.thinking)
        yield Tried("chatml", "the tokenizer has the tokens of ChatML", ChatMLRenderer(tokenizer, config))

    def exported_template(self, tokenizer: Any) -> str | None:
        """Return the template; without one, the ChatML form as one."""
        return super().exported_template(tokenizer) or ChatMLConfig().exported_template(tokenizer)
