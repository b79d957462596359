"""What is known of a chat template, in words."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.chat.chat_template import PROBE, USER, ChatTemplate
from agentrl.chat.description import Description
from agentrl.chat.template_facts import TemplateFacts
from agentrl.chat.thinking import Thinking
from agentrl.chat.turns import TurnEnd, Turns, says
from agentrl.errors import RendererError

_GIVEN = {"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception", "documents", "tojson"}
"""What transformers tells every template."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of transformers' own."""


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
        variables: what the recipe tells the template.
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
    """Return what a template says before a dialogue without a system message; empty where it is nothing."""
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
    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    try:
        tree = environment.parse(_GENERATION.sub("", text))
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
