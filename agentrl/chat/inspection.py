"""All that `agentrl chat` shows of a model's dialogues, as data."""

from typing import Any, Literal

from pydantic import BaseModel

from agentrl.chat.chat_template import USER
from agentrl.chat.description import Tried, describe
from agentrl.chat.proof import Finding, UnprovenError, prove
from agentrl.chat.renderer import Renderer, RendererConfig
from agentrl.chat.sample import Turn, sample
from agentrl.chat.turns import TOOLS
from agentrl.errors import RendererError


class Claim(BaseModel):
    """What a renderer should do, and whether it does."""

    claim: str
    result: Literal["proven", "lacking", "not so"]
    words: list[str]
    """Why it is lacking; or where it is not so."""


class Choice(BaseModel):
    """A renderer that was considered."""

    renderer: str
    chosen: bool
    reason: str


class StopToken(BaseModel):
    """A token that ends a turn."""

    id: int
    text: str


class Inspection(BaseModel):
    """What is known of a model's dialogues before anything is sampled."""

    model: str
    error: str | None = None
    """Why it is refused. None: it can be used."""
    no_tools: str | None = None
    """Why it is refused where an environment has tools. None: it is not."""
    tried: list[Choice] = []
    """In their order."""
    proof: list[Claim] = []
    facts: dict[str, str] = {}
    notes: list[str] = []
    """What a run says when it begins."""
    stop_tokens: list[StopToken] = []
    dialogue: list[Turn] = []


def inspect(config: RendererConfig, tokenizer: Any, *, name: str) -> Inspection:
    """Choose a renderer as a run does, and tell all that is known of it.

    Args:
        config: the section `chat` of a recipe.
        tokenizer: of the model.
        name: of the model.
    """
    found = Inspection(model=name)
    renderer: Renderer | None = None
    tried: list[Tried] = []
    try:
        for considered in config.tried(tokenizer, name=name):
            tried.append(considered)
            renderer = considered.renderer
    except UnprovenError as error:
        renderer, found.error, found.proof = error.renderer, str(error), _claims(error.findings)
    except RendererError as error:
        found.error = str(error)
    found.tried = [Choice(renderer=one.name, chosen=one.renderer is not None, reason=one.reason) for one in tried]
    if renderer is None:
        return found
    found.no_tools = _why_no_tools(renderer)
    description = describe(renderer)
    found.facts, found.notes = (
        description.facts,
        list(description.notes) or [note for note in (found.no_tools,) if note],
    )
    found.stop_tokens = [StopToken(id=i, text=str(tokenizer.convert_ids_to_tokens(i))) for i in renderer.stop_token_ids]
    try:
        if not found.proof:
            found.proof = _claims(prove(renderer, name=name, tools=() if found.no_tools else TOOLS))
        found.dialogue = sample(renderer, tokenizer, has_tools=found.no_tools is None)
    except UnprovenError as error:
        found.error, found.proof = str(error), _claims(error.findings)
    except RendererError as error:
        found.error = found.error or str(error)
    return found


def _why_no_tools(renderer: Renderer) -> str | None:
    try:
        renderer.start([USER], TOOLS)
    except RendererError as error:
        return str(error)
    return None


def _claims(findings: list[Finding]) -> list[Claim]:
    return [
        Claim(
            claim=finding.claim,
            result="not so" if finding.problems else "proven" if finding.lacks is None else "lacking",
            words=list(finding.problems) or ([finding.lacks] if finding.lacks else []),
        )
        for finding in findings
    ]
