"""The renderer of recipes that name none."""

from collections.abc import Iterator
from typing import Any

from agentrl.chat.chatml import ChatMLConfig
from agentrl.chat.encoder import Encoder
from agentrl.chat.proof.families import find_family, missing_package
from agentrl.chat.proof.template import UnprovenError, prove
from agentrl.chat.renderer import Renderer, RendererCandidate
from agentrl.chat.template import TemplateConfig, template_text
from agentrl.errors import RendererError


class AutoConfig(TemplateConfig):
    """Renderer that is proven to fit the tokenizer: of the package `renderers`, else the chat template, else ChatML."""

    renderer: str = "auto"

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        """Return the renderer that the tokenizer asks for."""
        return next(tried.renderer for tried in self.tried(tokenizer, name=name) if tried.renderer is not None)

    def tried(self, tokenizer: Any, *, name: str = "") -> Iterator[RendererCandidate]:
        """Yield what is considered in its order; the last is what `build` returns."""
        if not (tokenizer.chat_template or self.template):
            yield RendererCandidate("template", "the tokenizer has no chat template, and chat.template names none")
            config = self._chatml()
            yield RendererCandidate(
                "chatml", "the tokenizer has the tokens of ChatML", config.build(tokenizer, name=name)
            )
            return
        text = template_text(tokenizer, self, name)
        encode = Encoder(tokenizer, spelled=text)
        family = self._family(tokenizer, text, encode, name=name)
        yield family
        if family.renderer is None:
            whose = "chat.template names a chat template" if self.template else "the tokenizer has a chat template"
            yield RendererCandidate("template", whose, self._template(tokenizer, text, encode, name=name))

    def exported_template(self, tokenizer: Any) -> str | None:
        """Return the template; without one, the ChatML form as one."""
        return super().exported_template(tokenizer) or self._chatml().exported_template(tokenizer)

    def _chatml(self) -> ChatMLConfig:
        return ChatMLConfig(system=self.system, thinking=self.thinking)

    def _family(self, tokenizer: Any, text: str, encode: Encoder, *, name: str) -> RendererCandidate:
        if install := missing_package(tokenizer, text):
            return RendererCandidate("renderers", f"not looked at: {install}")
        found = find_family(
            tokenizer,
            template=text,
            variables=self.template_variables,
            date=self.date,
            name=name,
            system=self.system,
            thinking=self.thinking,
            encode=encode,
        )
        if found is None:
            return RendererCandidate(
                "renderers", "no renderer of the package is proven to write what the chat template writes"
            )
        try:
            prove(found, name=name)
        except UnprovenError as error:
            problem = next(finding.problems[0] for finding in error.findings if finding.problems)
            return RendererCandidate("renderers", f"{found.name} writes what the chat template writes, but {problem}")
        return RendererCandidate("renderers", f"{found.name} is proven to write what the chat template writes", found)

    def _template(self, tokenizer: Any, text: str, encode: Encoder, *, name: str) -> Renderer:
        try:
            return self.proven(tokenizer, name=name, encode=encode)
        except RendererError as error:
            if install := missing_package(tokenizer, text):
                error.args = (f"{error}. Or: {install}",)
            raise
