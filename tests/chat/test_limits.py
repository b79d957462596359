"""A chat template without an end is refused with one line, whatever it does and wherever it does it."""

import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.chat import AutoConfig, TemplateRenderer, limits
from agentrl.chat.limits import render_limited
from agentrl.errors import RendererError, TemplateLimitError, UserError
from tests.support.commands import run
from tests.support.each import each
from tests.support.families import family_of, family_tokenizer, template_names
from tests.support.templates import QWEN, tokenizer
from tests.support.tiers import first_of_each

USER = {"role": "user", "content": "Hello."}
LOOP = "{% for i in range(99999) %}"
DOUBLES = "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = "
ENDLESS = {
    "loops": 4 * LOOP + 4 * "{% endfor %}",
    "loops that write": 4 * LOOP + "text" + 4 * "{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text in a macro": "{% macro f() %}" + 3 * LOOP + "x" * 999 + 3 * "{% endfor %}" + "{% endmacro %}{{ f() }}",
    "times": "{{ 'a' * 10000000000 }}",
    "times a list": "{{ ([[1] * 9999] * 9999) | sum(start=[]) }}",
    "a power": "{{ 9 ** 999999999 }}",
    "numbers": DOUBLES.replace("'ab'", "9") + "ns.s * ns.s %}{% endfor %}{{ ns.s }}",
    "put together": DOUBLES + "ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "added": DOUBLES + "ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "joined": DOUBLES + "[ns.s, ns.s] | join %}{% endfor %}{{ ns.s }}",
    "joined by a method": DOUBLES + "'-'.join([ns.s, ns.s]) %}{% endfor %}{{ ns.s }}",
    "replaced": DOUBLES + "ns.s.replace('a', ns.s) %}{% endfor %}{{ ns.s }}",
    "replaced by a filter": DOUBLES + "ns.s | replace('a', ns.s) %}{% endfor %}{{ ns.s }}",
    "a set block": "{% set ns = namespace(s='ab') %}"
    + LOOP
    + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "lists of lists": DOUBLES.replace("'ab'", "[]") + "[ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "equal lists": DOUBLES.replace("'ab'", "[[], []]")
    + "[[ns.s[0], ns.s[0]], [ns.s[1], ns.s[1]]] %}{% endfor %}{{ ns.s[0] == ns.s[1] }}",
    "mappings": DOUBLES.replace("'ab'", "{}") + "{'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s | tojson }}",
    "dict": DOUBLES.replace("'ab'", "{}") + "dict(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s | string }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a named width": "{{ '%(n)10000000000d' % {'n': 1} }}",
    "a width as an operand": "{{ '%*d' % (10000000000, 1) }}",
    "a width of a filter": "{{ '%10000000000d' | format(1) }}",
    "a width of format": "{{ '{:10000000000}'.format(1) }}",
    "a width within a width": "{{ '{:{}}'.format(1, 10000000000) }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(width) }}".replace("width", "9999999999"),
    "expandtabs": "{{ '\\t'.expandtabs(9999999999) }}",
    "indent": "{{ 'a\\nb' | indent(9999999999) }}",
    "tojson": "{{ [1] | tojson(indent=9999999999) }}",
    "batch": "{{ [1] | batch(9999999999, 1) | list }}",
    "to_bytes": "{{ (1).to_bytes(9999999999, 'big') }}",
    "many pieces": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l = ns.l + ['a' * 9999999] %}{% endfor %}",
}
RAISING = {
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    "a range": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "nested": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    "blocks": ("{% if 1 %}" * 200 + "{% endif %}" * 200, ""),
    "zero": ("{{ 1 // 0 }}", "by zero"),
    "a float": ("{{ 9.0 ** 9999 }}", "out of range"),
    "another template": ("{% include 'a' %}", "no loader"),
    "an attribute": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "several lines": ("{{ raise_exception('one\n\ntwo') }}", "one two"),
    "lipsum": ("{{ lipsum(n=10 ** 6) }}", "undefined"),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.2)


@pytest.mark.slow
@each("name", ENDLESS)
def test_a_template_without_an_end_is_stopped(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(
        TemplateLimitError, match=r"^(takes more than 0\.2 s|makes (a value of )?more than [\d,]+ char)"
    ):
        render_limited(ENDLESS[name], messages=[USER], tools=None)
    assert time.process_time() - begun < 2


@pytest.mark.slow
@each("name", [*ENDLESS, *RAISING])
def test_a_model_with_such_a_template_is_refused_with_one_line(name: str) -> None:
    if name == "a range":
        return
    with pytest.raises(UserError) as caught:
        AutoConfig().build(tokenizer(ENDLESS.get(name) or RAISING[name][0]), name="org/model")
    assert str(caught.value).startswith("chat.renderer: the chat template of 'org/model' ")
    assert "\n" not in str(caught.value)


@each("name", RAISING)
def test_whatever_a_template_raises_is_one_line(name: str) -> None:
    template, words = RAISING[name]
    with pytest.raises(RendererError, match=words) as caught:
        TemplateRenderer(tokenizer(template + QWEN), name="org/model")
    assert "\n" not in str(caught.value)


@each("when", ["messages | length > 12", "tools", "messages[-1].role == 'tool'", "'bomb' in messages[-1].content"])
def test_a_template_that_ends_at_first_is_stopped_later(when: str) -> None:
    template = f"{{% if {when} %}}{ENDLESS['loops']}{{% endif %}}" + QWEN
    with pytest.raises(TemplateLimitError, match=r"may have no end\. Set chat.template to a file with another"):
        TemplateRenderer(tokenizer(template)).start([{**USER, "content": "A bomb."}] * 13, [])


def test_the_time_is_that_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.5)
    busy = "{% for i in range(20000) %}{% set x = i | string %}{% endfor %}done"
    assert [render_limited(busy, messages=[]) for _ in range(12)] == ["done"] * 12


def test_what_a_long_dialogue_needs_is_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 5.0)
    messages = [{"role": role, "content": "word " * 2000} for _ in range(100) for role in ("user", "assistant")]
    start = TemplateRenderer(tokenizer(QWEN)).start(messages, [])
    assert len(start) > 200 * 2000


@pytest.mark.slow
@each("name", first_of_each(template_names(), family_of))
def test_what_is_rendered_is_what_transformers_renders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 5.0)
    made = family_tokenizer(name)
    tool = {
        "name": "look",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"n": {"type": "string"}}},
    }
    tools: list[dict[str, Any]] = [{"type": "function", "function": tool}]
    calls = [{"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"n": "a"}}}]
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    dialogues: list[list[dict[str, Any]]] = [
        [USER],
        [{**USER, "role": "system"}, USER, said, USER],
        [
            USER,
            {**said, "content": "", "tool_calls": calls},
            {"role": "tool", "name": "look", "content": "b"},
            said,
            USER,
        ],
    ]

    def outcome(render: Any, **values: Any) -> Any:
        try:
            return render(**values, **made.special_tokens_map, strftime_now=lambda _: "today")
        except Exception as error:  # noqa: BLE001 - both raise alike
            return type(error), str(error)

    def as_transformers(*, messages: Any, **values: Any) -> str:
        texts: Any = render_jinja_template([messages], chat_template=made.chat_template, **values)
        return str(texts[0][0])

    for messages in dialogues:
        for with_tools in (None, tools):
            values = {"messages": messages, "tools": with_tools, "add_generation_prompt": True}
            ours = outcome(lambda **given: render_limited(made.chat_template, **given), **values)
            assert ours == outcome(as_transformers, **values)


def test_a_command_ends_with_one_line(tmp_path: Path) -> None:
    tokenizer(ENDLESS["times"]).save_pretrained(tmp_path)
    status, printed = run(["chat", str(tmp_path)])
    assert status == 2
    assert printed.count("\n") == 1
    assert "makes a value of more than" in printed
