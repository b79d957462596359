"""Facts about a chat template, found before the first sample: tools, calls, thoughts, and what it rewrites."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, meta, nodes

from agentrl.chat.chat_template import PROBE, TOOLS, USER, ChatTemplate, TurnEnd, Turns, answers, call, says
from agentrl.chat.forms import CallForm
from agentrl.chat.limits import parse_template
from agentrl.chat.renderer import Description, Thinking
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
    """Behaviour of a template."""

    form: CallForm
    """In which calls and thoughts are written."""
    no_tools: str | None
    """Why tools cannot be used. None: they can."""
    text_beside_calls: bool
    """Text before a call is written, and read again."""
    thoughts: bool
    """A thought is written, and read again."""
    thinking: Thinking
    """Thoughts of earlier turns that the family keeps."""
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
        RendererError: if it leaves out what somebody says.
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
    """Return whether a form reads a message as the template writes it."""
    is_thinking = opens_thought(turns.prompt([USER]), form)
    try:
        return form.parse(turns.written(message), TOOLS, is_thinking=is_thinking) == message
    except RendererError:
        return False


def _writes_text_beside_calls(template: ChatTemplate, turns: Turns, form: CallForm) -> bool:
    """Return whether text before a call is read again, and stays there when the tool has answered (in Gemma 4 it moves)."""
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
    """Return whether a dialogue begins with what it was, but for thoughts that hold nothing."""
    return _NO_THOUGHT.sub("", whole).startswith(_OPEN_THOUGHT.sub("", _NO_THOUGHT.sub("", context)))


def opens_thought(prompt: str, form: CallForm) -> bool:
    """Return whether what is sampled after a generation prompt begins within a thought."""
    return PROBE in form.parse(prompt + PROBE, (), is_thinking=False).get("reasoning_content", "")


def functions(message: Message) -> list[Any]:
    """Return what a message calls."""
    return [call["function"] for call in message.get("tool_calls") or []]


_GIVEN = {"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception", "documents", "tojson"}
"""Variables that transformers passes to every template."""


def describe_template(
    template: ChatTemplate,
    turns: Turns,
    facts: TemplateFacts,
    *,
    tokenizer: Any,
    text: str,
    thinking: Thinking,
    variables: Mapping[str, object],
) -> Description:
    """Return what a template does.

    Args:
        template: to speak of.
        turns: of it.
        facts: that were found out.
        tokenizer: whose template it is.
        text: of the template.
        thinking: what is in force.
        variables: passed by the recipe to the template.
    """
    shape = template.shape
    developer = "messages of their own" if shape.developer else "written as system messages"
    later = "" if shape.later else "; once the dialogue has begun, text of the user's"
    merged = "no such role: their text opens the first user message"
    return Description(
        facts={
            "calls": _calls(turns, facts),
            "end of a turn": "\n".join(_ends(turns, tokenizer)),
            "thoughts": _thoughts(facts, thinking, knows=shape.thought_key is not None),
            "history": "\n".join(_rewrites(facts)) or "never rewritten, but for thoughts that are dropped",
            "system messages": f"messages of their own{later}" if shape.system else merged,
            "developer messages": f"{developer}{later}" if shape.developer or shape.system else merged,
            "system prompt": _silent_prompt(template) or "none of the template's own",
            "BOS": _bos(template, tokenizer),
            "variables": _variables(text, tokenizer, variables),
        },
        notes=tuple(_notes(template, facts)),
    )


def _calls(turns: Turns, facts: TemplateFacts) -> str:
    if facts.no_tools is not None:
        return f"none: {facts.no_tools}"
    several = "several in a turn" if turns.parallel else "one in a turn"
    return f"{facts.form.name}, {several}, {'also' if facts.text_beside_calls else 'never'} after text"


def _ends(turns: Turns, tokenizer: Any) -> Iterator[str]:
    ends = {"of words": turns.said, "of calls": turns.called}
    if turns.called in (None, turns.said):
        ends = {"": turns.said}
    for what, end in ends.items():
        if end is not None:
            yield f"{what}: {_end(end, tokenizer)}".removeprefix(": ")


def _end(end: TurnEnd, tokenizer: Any) -> str:
    sampled, closing = tokenizer.convert_ids_to_tokens([end.stop_id, end.closing_id])
    if not end.is_written:
        return f"{sampled}, which opens the next turn"
    return sampled if sampled == closing else f"{sampled} is sampled, {closing} stands there later"


def _thoughts(facts: TemplateFacts, thinking: Thinking, *, knows: bool) -> str:
    words = {"keep": "kept", "drop_at_user": "dropped when a user speaks", "drop": "dropped after each turn"}
    own = "as the family does" if thinking == facts.thinking else f"the family's own: {facts.thinking}"
    opened = "; the generation prompt begins one" if facts.thinking_prompts else ""
    return f"{thinking}: {words[thinking]} ({own}){opened}{'' if knows else '; text of the message to this template'}"


def _rewrites(facts: TemplateFacts) -> Iterator[str]:
    for role, why in facts.rewrites.items():
        yield f"rewritten after messages of the role {role!r}: {why}"


def _silent_prompt(template: ChatTemplate) -> str:
    """Return what a template says before a dialogue without a system message; empty if it is nothing."""
    try:
        before, found, _ = template.render([{**USER, "content": PROBE}]).partition(PROBE)
        later = template.render([USER, says("..?"), {**USER, "content": PROBE}]).partition(PROBE)[0]
    except RendererError:
        return ""
    opening = len(before) if found else 0  # of a user's message, which every later one has too
    while opening and not later.endswith(before[-opening:]):
        opening -= 1
    text = before[: len(before) - opening]
    return text.strip() if any(map(str.isspace, text.strip())) else ""  # a BOS token alone is no prompt


def _bos(template: ChatTemplate, tokenizer: Any) -> str:
    bos = tokenizer.bos_token
    if not bos:
        return "the tokenizer has none"
    count = template.render([USER], prompt=True).count(bos)
    written = {0: f"none: the template does not write {bos}", 1: f"{bos}, written by the template"}
    return f"{written.get(count, f'{bos}, written {count} times by the template')}; the tokenizer adds none"


def _variables(text: str, tokenizer: Any, variables: Mapping[str, object]) -> str:
    told = [f"{name}: {value!r}" for name, value in variables.items()]
    free = sorted(_read(text) - _GIVEN - set(tokenizer.special_tokens_map) - set(variables))
    words = [f"set: {', '.join(told)}"] if told else []
    words += [f"read, and not set: {', '.join(free)}"] if free else []
    return "\n".join(words) or "none are read"


def _read(text: str) -> set[str]:
    """Return the variables that a template reads: those that it does not set, or sets where nobody else has."""
    try:
        tree = parse_template(text)
    except TemplateError:  # a tag of somebody's own
        return set()
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    own |= {macro.name for macro in tree.find_all(nodes.Macro)}
    tests = [test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    tested = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}
    return meta.find_undeclared_variables(tree) - (own - tested)


def _notes(template: ChatTemplate, facts: TemplateFacts) -> Iterator[str]:
    whose = f"the chat template of {template.name!r}"
    if not template.shape.system:
        yield f"{whose} has no system messages: their text opens the first user message"
    if facts.rewrites:
        roles = " and ".join(map(repr, facts.rewrites))
        why = next(iter(facts.rewrites.values()))
        yield f"{whose} rewrites history after messages of the role {roles} ({why}): each begins a new segment there"
    if facts.no_tools is not None:
        yield f"{whose} cannot be used with tools: {facts.no_tools}"
