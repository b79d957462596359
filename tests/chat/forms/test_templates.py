"""Each form reads what the template of its family writes."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.chat.forms import FORMS
from agentrl.types import Message
from tests.support.each import each
from tests.support.hostile_forms import TOOLS

TRL = find_spec("trl")
pytestmark = pytest.mark.skipif(TRL is None, reason="TRL, which ships the templates, is not installed")
FOLDER = Path(((TRL and TRL.submodule_search_locations) or ["."])[0], "chat_templates")
BY_NAME = {form.name: form for form in FORMS}
FAMILIES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen-xml",
    "qwen3_5_nothink": "qwen-xml",
    "qwen3_6": "qwen-xml",
    "qwen3_8": "qwen-xml",
    "nemotron_3_nano": "qwen-xml",
    "nemotron_3_super": "qwen-xml",
    "nemotron_3_ultra": "qwen-xml",
    "nemotron_3_5_lightning": "qwen-xml",
    "glm4moe": "glm",
    "gemma4": "gemma4",
    "gemma4_v5": "gemma4",
    "diffusion_gemma": "gemma4",
    "gptoss": "harmony",
    "muse_glimmer": "atem",
    "lfm2_v2": "lfm",
    "lfm2_2_5_vl": "lfm",
    "lfm2_2_5": "lfm-raw",
    "lfm2_2_5_v2": "lfm-raw",
    "deepseekv3": "deepseek",
    "llama3_1": "llama-json",
    "llama3_2": "llama-json",
}
SINGLE = ("gptoss", "llama3_1", "llama3_2")
"""Templates that write one call a turn."""
ENDS = ("<|eot_id|>", "<|im_end|>", "<|call|>", "<|eot|>", "<turn|>", "<｜end▁of▁sentence｜>", "<|tool_response>")
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"n": -7, "what": "a key"},
    {"what": 'it\'s "q" \\ é\nline', "flag": False, "x": 0.5, "maybe": None, "items": [1, "a"], "table": {"k": [{}]}},
    {"what": "17", "items": [], "table": {}},
    {"what": "null"},
    {"what": " true "},
)


def rendered(template: str, messages: list[Message], **options: Any) -> str:
    texts: Any = render_jinja_template(
        conversations=[messages], chat_template=template, tools=[*TOOLS], bos_token="<s>", eos_token="</s>", **options
    )
    return str(texts[0][0])


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> tuple[str, bool]:
    """Return what a family writes after the prompt, without its stop token, and whether the prompt begins a thought."""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    as_text = name.startswith("deepseek")
    functions = [{"name": n, "arguments": json.dumps(a) if as_text else a} for n, a in calls]
    tool_calls = [{"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    user: Message = {"role": "user", "content": "Hello."}
    prompt = rendered(template, [user], add_generation_prompt=True)
    whole = rendered(template, [user, {"role": "assistant", "content": "", "tool_calls": tool_calls}])
    if not whole.startswith(prompt):
        prompt = rendered(template, [user])
    text = whole.removeprefix(prompt).removeprefix("<｜Assistant｜>").removeprefix("<|im_start|>assistant\n").rstrip()
    assert text != whole
    for end in ENDS:
        text = text.removesuffix(end)
    return text, prompt.rstrip().endswith("<think>")


def check_a_call(name: str, arguments: dict[str, Any]) -> None:
    text, is_thinking = written(name, ("take_it", arguments))
    message = BY_NAME[FAMILIES[name]].parse(text, TOOLS, is_thinking=is_thinking)
    (call,) = message["tool_calls"]
    assert call == {"id": "call_0", "type": "function", "function": {"name": "take_it", "arguments": arguments}}
    assert repr(call["function"]["arguments"].get("flag")) == repr(arguments.get("flag"))  # False, and not 0


def check_parallel_calls(name: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("look", {"n": 1}), ("take_it", {"what": "b"}), ("look", {})]
    text, is_thinking = written(name, *calls)
    message = BY_NAME[FAMILIES[name]].parse(text, TOOLS, is_thinking=is_thinking)
    assert [c["function"] for c in message["tool_calls"]] == [{"name": n, "arguments": a} for n, a in calls]
    assert [c["id"] for c in message["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert message["content"] == ""


def check_the_first_form_that_reads_it(name: str) -> None:
    arguments = {"what": 'it\'s \\ a "key"', "n": 1}
    text, is_thinking = written(name, ("look", arguments))
    expected = [{"name": "look", "arguments": arguments}]
    read = [
        form.name
        for form in FORMS
        if [c["function"] for c in form.parse(text, TOOLS, is_thinking=is_thinking).get("tool_calls", [])] == expected
    ]
    assert read[0] == FAMILIES[name]


@each("name", FAMILIES)
def test_a_form_reads_what_its_template_writes_and_is_the_first_that_does(name: str, subtests: pytest.Subtests) -> None:
    for arguments in ARGUMENTS:
        with subtests.test("a call", arguments=arguments):
            check_a_call(name, arguments)
    if name not in SINGLE:
        with subtests.test("parallel calls"):
            check_parallel_calls(name)
    with subtests.test("the first form that reads it"):
        check_the_first_form_that_reads_it(name)
