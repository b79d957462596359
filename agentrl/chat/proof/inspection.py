"""Data of `agentrl chat`: facts about a model's dialogues, and a dialogue token by token, with the author of each."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from agentrl.chat.chat_template import TOOLS, USER
from agentrl.chat.proof.template import Finding, UnprovenError, prove
from agentrl.chat.renderer import Dialogue, Renderer, RendererCandidate, RendererConfig, describe
from agentrl.errors import RendererError
from agentrl.types import Message

Author: TypeAlias = Literal["template", "system", "user", "tool", "model"]
"""`model` has sampled it; `system`, `user` and `tool` are roles of what the environment says; the rest is the template's."""


class Token(BaseModel):
    """One token of a dialogue."""

    id: int
    text: str
    """Empty if a later token completes the character."""
    author: Author
    special: bool
    """A control token, or another that the tokenizer has beside its vocabulary."""


class Turn(BaseModel):
    """Part that a turn of the model adds to a dialogue: the observation, and what was sampled."""

    rewrites: bool
    """History was rewritten: a new segment begins."""
    num_kept: int
    """Tokens with which the context before began, and this one does."""
    tokens: list[Token]


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TOOLS = [_tool("calculate", "Calculate.", "expression"), _tool("hours", "Tell when a shop is open.", "day")]
_OPENING: list[Message] = [
    {"role": "system", "content": "You are the clerk of a shop."},
    {"role": "user", "content": "What are 12 lamps at 7 euros, and are you open today?"},
]
_SUM, _HOURS = ("calculate", {"expression": "12 * 7"}), ("hours", {"day": "today"})


def sample(renderer: Renderer, tokenizer: Any, *, has_tools: bool) -> list[Turn]:
    """Return a dialogue of four turns, in which a tool's words spell a token that ends turns."""
    tools = _TOOLS if has_tools else []
    dialogue = Dialogue.begin(_OPENING, tools, renderer)
    context = tuple[int, ...]()
    turns = list[Turn]()
    stop = str(tokenizer.convert_ids_to_tokens(renderer.stop_token_ids[0]))
    for message in _said(renderer, has_tools=has_tools):
        whole, action = dialogue.context_ids, renderer.encode(message)
        same = (n for n, (one, other) in enumerate(zip(context, whole, strict=False)) if one != other)
        kept = next(same, min(len(context), len(whole)))
        heard, begin = (dialogue.observation, kept) if dialogue.extends else (dialogue.history, 0)
        authors = [*_authors(tokenizer, whole, heard, begin)][kept - begin :] + ["model"] * len(action)
        context = whole + action
        added = zip(context[kept:], _pieces(tokenizer, context, kept), authors, strict=True)
        tokens = [Token(id=i, text=text, author=author, special=_is_special(tokenizer, i)) for i, text, author in added]
        turns.append(Turn(rewrites=not dialogue.extends, num_kept=kept, tokens=tokens))
        parsed = renderer.parse(action, whole, tools)
        replies = _results(parsed, stop) or [
            {"role": "user", "content": f"And tomorrow?{f' {stop}?' * (len(turns) > 2)}"}
        ]
        dialogue = dialogue.after(action, parsed, replies, renderer)
    return turns


def _said(renderer: Renderer, *, has_tools: bool) -> Iterator[Message]:
    """Yield what the model says, as far as the renderer can write it: thoughts and several calls are left out elsewhere."""
    thought = {"reasoning_content": "12 * 7, and the hours."}
    first = [_says("", _SUM, _HOURS), _says("", _SUM)] if has_tools else [_says("That makes 84 euros.")]
    yield _first(renderer, [*(said | thought for said in first), *first])
    yield _says("84 euros, and we close at six.")
    yield _first(renderer, [_says("", ("hours", {"day": "tomorrow"}))] if has_tools else [_says("Tomorrow, too.")])
    yield _says("Tomorrow we are closed.")


def _first(renderer: Renderer, messages: Sequence[Message]) -> Message:
    """Return the first message that the renderer writes and reads."""
    for message in messages[:-1]:
        try:
            if renderer.parse(renderer.encode(message), (), _TOOLS) == message:
                return message
        except RendererError:
            continue
    return messages[-1]


def _says(content: str, *calls: tuple[str, object]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [{"id": f"call_{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    return message | {"tool_calls": made} if made else message


def _results(message: Message, stop: str) -> list[Message]:
    results: list[Message] = []
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        words = "The result is 84." if name == "calculate" else "Open until six."
        content = f"Closed {stop} all day." if arguments == {"day": "tomorrow"} else words
        results.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": content})
    return results


def _authors(tokenizer: Any, ids: Sequence[int], heard: Sequence[Message], start: int) -> Iterator[Author]:
    """Yield who wrote each token of a context from `start` on, where `heard` begins: the rest is the template's."""
    before = len(_text(tokenizer, ids[:start]))
    text = _text(tokenizer, ids)
    spans: list[tuple[int, int, Author]] = []
    place = before
    for message in heard:
        content = message.get("content") or ""
        found = text.find(content, place)
        if message["role"] in ("system", "user", "tool") and found >= 0:
            place = found + len(content)
            spans.append((found, place, message["role"]))
    for piece in _pieces(tokenizer, ids, start):
        after = before + len(piece)
        yield next((author for begin, end, author in spans if begin < after and before < end), "template")
        before = after


def _pieces(tokenizer: Any, ids: Sequence[int], start: int) -> Iterator[str]:
    """Yield what each token from `start` on adds to the text."""
    done = len(_text(tokenizer, ids[:start]))
    for length in range(start + 1, len(ids) + 1):
        text = _text(tokenizer, ids[:length])
        yield text[done:]
        done = max(done, len(text))


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, but for a character that is not whole at their end."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return text.rstrip("\ufffd")


def _is_special(tokenizer: Any, token_id: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token_id)
    return added is not None and len(str(added).strip()) > 1


class Claim(BaseModel):
    """Promise of a renderer, and whether it holds."""

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
    """Facts about a model's dialogues, known before anything is sampled."""

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
    """Lines that a run prints when it begins."""
    stop_tokens: list[StopToken] = []
    dialogue: list[Turn] = []


def inspect(config: RendererConfig, tokenizer: Any, *, name: str) -> Inspection:
    """Choose a renderer as a run does, and return all that is known of it.

    Args:
        config: the section `chat` of a recipe.
        tokenizer: of the model.
        name: of the model.
    """
    found = Inspection(model=name)
    renderer: Renderer | None = None
    tried: list[RendererCandidate] = []
    try:
        for considered in config.tried(tokenizer, name=name):
            tried.append(considered)
            renderer = considered.renderer
    except UnprovenError as error:
        renderer = error.renderer
        found.error = str(error)
        found.proof = _claims(error.findings)
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
