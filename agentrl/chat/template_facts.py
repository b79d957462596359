"""What is found out about a chat template before the first sample: tools, calls, thoughts, and what it rewrites."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.chat_template import PROBE, USER, ChatTemplate
from agentrl.chat.forms import CallForm
from agentrl.chat.thinking import Thinking
from agentrl.chat.turns import TOOLS, Turns, answers, call, says
from agentrl.errors import RendererError
from agentrl.types import Message

_NO_THOUGHT = re.compile(r"(?:<think>\s*</think>|<\|channel>thought\s*<channel\|>)\s*")
"""A thought that holds nothing: families write and drop it where they please, and what was sampled of it stays."""
_OPEN_THOUGHT = re.compile(r"(?:<think>|<\|channel>thought)\s*\Z")
_PLAYS = ((0,) * 4, (1, 2, 1, 1), (0, 1, 0, 2, 1, 0))
"""Turns by their number of calls: words alone, tools alone, both."""
_WORDS = says("Some words.")
_THOUGHTFUL = _WORDS | {"reasoning_content": "A thought."}
_MORE: Message = {"role": "user", "content": "More."}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What a template does."""

    form: CallForm
    """In which calls and thoughts are written."""
    no_tools: str | None
    """Why tools cannot be used. None: they can."""
    text_beside_calls: bool
    """Text before a call is written, and read again."""
    thoughts: bool
    """A thought is written, and read again."""
    thinking: Thinking
    """What the family does with thoughts of earlier turns."""
    rewrites: dict[str, str]
    """Roles after whose words the template changes earlier turns otherwise, with what it changes."""
    thinking_prompts: tuple[str, ...]
    """Generation prompts that leave a thought open."""


def find_facts(template: ChatTemplate, turns: Turns, forms: Sequence[CallForm], *, name: str) -> TemplateFacts:
    """Ask a template by rendering.

    Args:
        template: to be asked.
        turns: of it.
        forms: to read calls with, the first that can is taken.
        name: of the model, for error messages.

    Raises:
        RendererError: where it leaves out what somebody says.
    """
    form, no_tools = _find_form(template, turns, forms)
    if no_tools is None and (lost := _left_out(template, turns, has_tools=True)):
        no_tools = lost
    if no_tools is not None and (lost := _left_out(template, turns, has_tools=False)):
        raise RendererError(
            f"chat.renderer: the chat template of {name!r} cannot be used: {lost}. Set chat.template to another"
        )
    has_tools = no_tools is None
    prompts = {turns.prompt([USER])}
    if has_tools:
        prompts.add(turns.prompt([USER, says("", call(0, "look", n=1)), *answers(1)]))
    return TemplateFacts(
        form=form,
        no_tools=no_tools,
        text_beside_calls=has_tools and _writes_text_beside_calls(template, turns, form),
        thoughts=_reads(form, turns, _THOUGHTFUL),
        thinking=_find_thinking(template, has_tools=has_tools),
        rewrites=dict(_rewriting(template, turns, has_tools=has_tools)),
        thinking_prompts=tuple(prompt for prompt in sorted(prompts) if opens_thought(prompt, form)),
    )


def _find_form(template: ChatTemplate, turns: Turns, forms: Sequence[CallForm]) -> tuple[CallForm, str | None]:
    """Return the form in which a template writes calls, and why tools cannot be used with it."""
    reading = [form for form in forms if _reads(form, turns, _WORDS)]
    # Of those that read words alike, one that reads the thoughts too.
    default = next((form for form in reading if _reads(form, turns, _THOUGHTFUL)), (*reading, forms[0])[0])
    try:
        context = template.render([USER], TOOLS, prompt=True)
    except RendererError as error:
        return default, str(error)
    if not all(tool["function"]["name"] in context for tool in TOOLS):
        return default, "it leaves out the tools"
    if turns.called is None:
        return default, "it writes no calls, or no messages of the role 'tool'"
    message = says("", call(0, "look", n=7, text="a b"))
    form = next((form for form in reading if _reads(form, turns, message)), None)
    if form is not None:
        return form, None
    try:
        text = turns.written(message)
    except RendererError as error:
        return default, str(error)
    return default, f"it writes calls in a form that is not known here: {text[:80]!r}"


def _reads(form: CallForm, turns: Turns, message: Message) -> bool:
    """Tell whether a form reads a message as the template writes it."""
    is_thinking = opens_thought(turns.prompt([USER]), form)
    try:
        return form.parse(turns.written(message), TOOLS, is_thinking=is_thinking) == message
    except RendererError:
        return False


def _writes_text_beside_calls(template: ChatTemplate, turns: Turns, form: CallForm) -> bool:
    """Tell whether text before a call is read again, and stays there when the tool has answered (in Gemma 4 it moves)."""
    message = says("Some words.", call(0, "look", n=1))
    if not _reads(form, turns, message):
        return False
    text = re.sub(r"\A\s*</think>\s*", "", _NO_THOUGHT.sub("", turns.written(message)))  # a thought may be dropped
    return text in template.render([USER, message, *answers(1)])


def _find_thinking(template: ChatTemplate, *, has_tools: bool) -> Thinking:
    """Return what a template does with a thought once somebody else has spoken."""
    said = says("Yes.") | {"reasoning_content": PROBE}
    called = says("", call(0, "look", n=1)) | {"reasoning_content": PROBE}
    if PROBE in template.render([USER, said, _MORE], prompt=True):
        return "keep"
    if has_tools and PROBE in template.render([USER, called, *answers(1)], prompt=True):
        return "drop_at_user"
    return "drop"


def _left_out(template: ChatTemplate, turns: Turns, *, has_tools: bool) -> str | None:
    """Return what a dialogue lacks of its last turn. None: nothing."""
    for counts in _PLAYS if has_tools else _PLAYS[:1]:
        for message, replies, whole in _told(template, turns, counts, has_tools=has_tools):
            if lost := [reply["role"] for reply in replies if reply["content"] not in whole]:
                return f"it leaves out messages of the role {lost[0]!r}"
            if message["content"] not in whole:
                return "it leaves out what the assistant said"
    return None


def _rewriting(template: ChatTemplate, turns: Turns, *, has_tools: bool) -> Iterator[tuple[str, str]]:
    """Yield the roles after whose words the template changes what was said before, and what it changes."""
    for counts in _PLAYS if has_tools else _PLAYS[:1]:
        context = template.render([USER], TOOLS if has_tools else (), prompt=True)
        for number, (_, replies, whole) in enumerate(_told(template, turns, counts, has_tools=has_tools), start=1):
            added = turns.added_text(replies)
            if not _begins(whole, context):
                yield replies[0]["role"], f"turn {number} changes the text of the turns before it"
            elif not whole.endswith(added):
                yield (
                    replies[0]["role"],
                    f"after turn {number} the text of a new message depends on the messages before it",
                )
            context = whole


def _told(
    template: ChatTemplate, turns: Turns, counts: Sequence[int], *, has_tools: bool
) -> Iterator[tuple[Message, list[Message], str]]:
    """Play a turn for each number of calls; yield what the assistant says, what it hears, and the whole dialogue."""
    messages: list[Message] = [USER]
    for number, count in enumerate(counts, start=1):
        replies: list[Message] = [{"role": "user", "content": f"More of {number}."}]
        message = says(f"Text {number}.")
        if count:
            heard = answers(count if turns.parallel else 1)
            replies = [{**reply, "content": f"{reply['content']} In turn {number}."} for reply in heard]
            message = says("", *(call(i, reply["name"], n=number) for i, reply in enumerate(replies)))
        messages += [message, *replies]
        yield message, replies, template.render(messages, TOOLS if has_tools else (), prompt=True)


def _begins(whole: str, context: str) -> bool:
    """Tell whether a dialogue begins with what it was, but for thoughts that hold nothing."""
    return _NO_THOUGHT.sub("", whole).startswith(_OPEN_THOUGHT.sub("", _NO_THOUGHT.sub("", context)))


def opens_thought(prompt: str, form: CallForm) -> bool:
    """Tell whether what is sampled after a generation prompt begins within a thought."""
    return PROBE in form.parse(prompt + PROBE, (), is_thinking=False).get("reasoning_content", "")


def functions(message: Message) -> list[Any]:
    """Return what a message calls."""
    return [call["function"] for call in message.get("tool_calls") or []]
