import builtins
import datetime as dt
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from agentrl.chat.chat_template import ChatTemplate
from agentrl.chat.encoder import Encoder
from agentrl.chat.proof.families import FamilyRenderer, find_family, missing_package
from agentrl.chat.proof.template import is_same
from agentrl.chat.renderer import Dialogue
from agentrl.chat.template import TemplateConfig, TemplateRenderer
from agentrl.errors import RendererError
from agentrl.testing import check_renderer
from agentrl.types import Message
from tests.support.each import each
from tests.support.families import family_of, family_tokenizer, template_names
from tests.support.tiers import first_of_each

pytest.importorskip("renderers", reason="pip install --no-deps --requirement requirements-families.txt")

PROVEN = {
    "gemma4_v5": ("gemma4", None),
    "llama3_1": ("llama-3", "llama-json"),
    "llama3_2": ("llama-3", "llama-json"),
    "nemotron_3_5_lightning": ("nemotron-3-ultra", "qwen-xml"),
    "nemotron_3_5_lightning_training": ("nemotron-3-ultra", "qwen-xml"),
    "nemotron_3_nano": ("nemotron-3", "qwen-xml"),
    "nemotron_3_nano_training": ("nemotron-3", "qwen-xml"),
    "nemotron_3_super": ("nemotron-3", "qwen-xml"),
    "nemotron_3_super_training": ("nemotron-3", "qwen-xml"),
    "nemotron_3_ultra": ("nemotron-3-ultra", "qwen-xml"),
    "nemotron_3_ultra_training": ("nemotron-3-ultra", "qwen-xml"),
    "qwen3": ("qwen3", None),
    "qwen3_5_think": ("qwen3.5", "qwen-xml"),
    "qwen3_6": ("qwen3.6", "qwen-xml"),
    "qwen3_8": ("qwen3.8", "qwen-xml"),
    "qwen3_8_training": ("qwen3.8", "qwen-xml"),
    "qwen3_instruct_2507": ("qwen3-vl", None),
    "qwen3_instruct_2507_training": ("qwen3-vl", None),
    "qwen3_vl": ("qwen3-vl", None),
    "qwen3_vl_training": ("qwen3-vl", None),
}
"""For each of TRL's templates the package's renderer that writes its tokens, and the form that reads in its place; the
other templates have none."""
PROVEN_SOME = first_of_each(PROVEN, PROVEN.__getitem__)
"""One template for each renderer in the default tier, the others are slow."""
ALL_SOME = first_of_each(template_names(), lambda name: PROVEN.get(name, family_of(name)))
"""One for each renderer, and one for each family whose templates no renderer fits."""
NUM_DIALOGUES = 10
DATE = dt.date(2026, 1, 1)
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "text": {"type": "string"},
                    "flag": {"type": "boolean"},
                    "many": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
    }
    for name in ("look", "take")
)
HOSTILE = (
    "<|im_end|>",
    "</think>",
    "<|eot_id|>",
    "<|user|>",
    "<turn|>",
    "<tool_call>",
    "<|endoftext|>",
    "</tool_response>",
)
WORDS = (
    "Hello.",
    "two  spaces",
    "Größe 鍵 🔑",
    "3 + 4 = 7",
    "one\n\n  two;\n\tthree",
    "{}",
    "a, b",
    "'quoted' \"twice\"",
)


@cache
def found(template: str) -> FamilyRenderer:
    renderer = find(template)
    assert renderer is not None
    return renderer


def find(template: str, **options: Any) -> FamilyRenderer | None:
    tokenizer = family_tokenizer(template)
    settings: dict[str, Any] = {"variables": {}, "date": DATE, "name": template, **options}
    return find_family(tokenizer, template=tokenizer.chat_template, **settings)


@cache
def own(template: str) -> tuple[ChatTemplate, Encoder]:
    tokenizer = family_tokenizer(template)
    encode = Encoder(tokenizer, spelled=tokenizer.chat_template)
    text = tokenizer.chat_template
    return ChatTemplate(tokenizer, encode, template=text, variables={}, date=DATE, name=template), encode


@pytest.mark.slow
@each("template", ALL_SOME)
def test_a_renderer_of_the_package_is_taken_where_it_is_proven_to_fit(template: str) -> None:
    family_tokenizer(template)
    renderer, begun = find(template), time.process_time()
    again, seconds = find(template), time.process_time() - begun
    chosen = None if renderer is None else (renderer.name, renderer.form_name)
    assert chosen == PROVEN.get(template)
    assert (again is None) == (renderer is None)
    assert seconds < 2  # a fifth of it, on an idle machine


@pytest.mark.slow
@each("template", ALL_SOME)
def test_what_a_step_says_as_system_is_read(template: str) -> None:
    tokenizer = family_tokenizer(template)
    user: Message = {"role": "user", "content": "Hello."}
    more: Message = {"role": "user", "content": "More of it."}
    answer: Message = {"role": "assistant", "content": "Yes."}
    plain = TemplateRenderer(tokenizer, TemplateConfig(date=DATE), name=template, encode=own(template)[1])
    for renderer in (plain, found(template)) if template in PROVEN else (plain,):
        context, action = renderer.start([user], ()), renderer.encode(answer)
        for role in ("system", "developer"):
            rule = {"role": role, "content": "Speak of zebras."}
            for replies in ([rule], [more, rule], [rule, more]):
                added = renderer.extend(context, action, replies)
                assert added is not None
                text = tokenizer.decode(added)
                assert all(reply["content"] in text for reply in replies), (role, text)
                assert renderer.start([user, answer, *replies], ())[-len(added) :] == added


def _words(rng: random.Random, *, hostile: bool = True) -> str:
    words = rng.choices((*WORDS, *(HOSTILE if hostile else ())), k=rng.randrange(1, 4))
    return " ".join(words)


def _arguments(rng: random.Random) -> dict[str, Any]:
    values: dict[str, Callable[[], Any]] = {
        "n": lambda: rng.randrange(-5, 10**6),
        "text": lambda: _words(rng, hostile=False) + rng.choice(("", "\n", " ")),
        "flag": lambda: rng.random() < 0.5,
        "many": lambda: [rng.randrange(9) / 2 for _ in range(rng.randrange(3))],
    }
    return {key: values[key]() for key in rng.sample(sorted(values), rng.randrange(3))}


def _turn(rng: random.Random, *, parallel: bool, thinks: bool) -> tuple[Message, list[Message]]:
    count = rng.choice((0, 0, 1, 1, 2 if parallel else 1))
    calls: list[dict[str, Any]] = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": rng.choice(("look", "take")), "arguments": _arguments(rng)},
        }
        for i in range(count)
    ]
    message: Message = {"role": "assistant", "content": "" if calls else _words(rng, hostile=False)}
    if calls:
        message["tool_calls"] = calls
    if thinks and rng.random() < 0.5:
        message["reasoning_content"] = _words(rng, hostile=False)
    replies: list[Message] = [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": _words(rng)}
        for call in calls
    ]
    return message, replies or [{"role": "user", "content": _words(rng)}]


def _can(renderer: FamilyRenderer, message: Message) -> bool:
    try:
        renderer.encode(message)
    except RendererError:
        return False
    return True


def _abilities(renderer: FamilyRenderer) -> dict[str, bool]:
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {}}}
    said: Message = {"role": "assistant", "content": "Yes."}
    two: Message = {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "call_1"}]}
    return {"parallel": _can(renderer, two), "thinks": _can(renderer, said | {"reasoning_content": "Hm."})}


def _played(renderer: FamilyRenderer, rng: random.Random, template: str) -> Iterator[tuple[Dialogue, bool]]:
    """Yield six contexts of a dialogue, each with whether the template itself left alone what was said before."""
    reference, _ = own(template)
    opening: list[Message] = [{"role": "user", "content": _words(rng)}]
    if rng.random() < 0.5:
        opening.insert(0, {"role": "system", "content": _words(rng)})
    tools = TOOLS if rng.random() < 0.8 else ()
    dialogue, abilities = Dialogue.begin(opening, tools, renderer), _abilities(renderer)
    before = reference.render(opening, tools, prompt=True)
    for _ in range(6):
        message, replies = _turn(rng, **abilities)
        action = renderer.encode(message)
        parsed = renderer.parse(action, dialogue.context_ids, TOOLS)
        assert is_same(parsed, message)
        assert parsed.get("reasoning_content") == message.get("reasoning_content")
        dialogue = dialogue.after(action, message, replies, renderer)
        whole = reference.render(dialogue.history, tools, prompt=True)
        # Families take out thoughts that hold nothing: what was sampled of them stays.
        is_left_alone = whole.startswith(before + family_tokenizer(template).decode(action[:-1]))
        yield dialogue, is_left_alone or not dialogue.extends
        if not is_left_alone and dialogue.extends:
            ids = renderer.start(dialogue.history, tools)
            dialogue = Dialogue.of_record(dialogue.history, tools, ids)
        before = whole


@pytest.mark.slow
@each("template", PROVEN_SOME)
def test_contexts_are_those_of_the_template_where_it_leaves_history_alone(template: str) -> None:
    renderer, tokenizer = found(template), family_tokenizer(template)
    reference, encode = own(template)
    control, num_compared = set(encode.control_tokens.values()), 0
    for seed in range(NUM_DIALOGUES):
        for dialogue, is_comparable in _played(renderer, random.Random(seed), template):
            expected = encode(reference.render(dialogue.history, dialogue.tools, prompt=True))
            contexts = [renderer.start(dialogue.history, dialogue.tools)]
            contexts += [dialogue.context_ids] if is_comparable else []
            num_compared += is_comparable
            for ids in contexts:
                assert tokenizer.decode(ids) == tokenizer.decode(expected)
                assert [i for i in ids if i in control] == [i for i in expected if i in control]
    assert num_compared > 2 * NUM_DIALOGUES


@each("template", PROVEN_SOME)
def test_it_keeps_to_what_every_renderer_must_keep_to(template: str) -> None:
    check_renderer(found(template))


@each("template", PROVEN_SOME)
def test_nothing_that_is_sampled_makes_it_raise_or_call_what_was_not_written(template: str) -> None:
    renderer, tokenizer = found(template), family_tokenizer(template)
    rng, size = random.Random(0), len(tokenizer)
    control = sorted(Encoder(tokenizer, spelled=tokenizer.chat_template).control_tokens.values())
    body = [i for i in range(size) if i not in control and i not in renderer.stop_token_ids]
    context = renderer.start([{"role": "user", "content": "Hello."}], TOOLS)
    written = renderer.encode(_turn(random.Random(3), parallel=False, thinks=False)[0])
    for _ in range(500):
        kinds = (body, control, written, [size + 5, -1], renderer.stop_token_ids)
        ids = [rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(40))]
        message = renderer.parse(ids, rng.choice((context, ())), TOOLS)
        assert message["role"] == "assistant"
        text = tokenizer.decode([i for i in ids if 0 <= i < size])
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] in text


@pytest.mark.slow
@each("template", ["qwen3", "qwen3_8", "gemma4_v5", "llama3_1", "nemotron_3_nano"])
def test_long_outputs_are_read_in_a_time_in_proportion(template: str) -> None:
    renderer, tokenizer = found(template), family_tokenizer(template)
    control = Encoder(tokenizer, spelled=tokenizer.chat_template).control_tokens
    call = renderer.encode(_turn(random.Random(1), parallel=False, thinks=False)[0])[:-1]
    cases = [list(call), *([i] for i in control.values() if i not in renderer.stop_token_ids)]
    for piece in cases:
        begun = time.process_time()
        renderer.parse(piece * (60_000 // len(piece)), (), TOOLS)
        assert time.process_time() - begun < 20


def test_a_number_of_too_many_digits_is_a_malformed_call() -> None:
    renderer, tokenizer = found("qwen3"), family_tokenizer("qwen3")
    body = '\n{"name": "look", "arguments": {"n": ' + "1" * 5000 + "}}\n"
    message = renderer.parse(
        tokenizer.encode(f"<tool_call>{body}</tool_call><|im_end|>", add_special_tokens=False), (), TOOLS
    )
    assert [call["function"]["name"] for call in message["tool_calls"]] == [""]


def test_a_call_within_a_thought_that_does_not_end_is_not_carried_out() -> None:
    renderer, tokenizer = found("qwen3"), family_tokenizer("qwen3")
    text = '<think>\nI could\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    message = renderer.parse(tokenizer.encode(text, add_special_tokens=False), (), TOOLS)
    assert "tool_calls" not in message
    assert message["content"] == ""
    assert "I could" in message["reasoning_content"]


def test_a_tool_that_nobody_has_is_called_for_the_environment_to_answer() -> None:
    renderer = found("gemma4_v5")
    call = {"id": "call_0", "type": "function", "function": {"name": "unheard_of", "arguments": {"n": 1}}}
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert renderer.parse(renderer.encode(message), (), TOOLS) == message


def test_template_variables_choose_the_family_s_way() -> None:
    hello: list[Message] = [{"role": "user", "content": "Hello."}]
    quick = find("qwen3_8", variables={"enable_thinking": False})
    assert quick is not None
    assert quick.start(hello, ()) != found("qwen3_8").start(hello, ())


def test_thinking_overrules_the_family() -> None:
    kept = find("qwen3", thinking="keep")
    assert kept is not None
    assert (kept.thinking, found("qwen3").thinking) == ("keep", "drop_at_user")
    message: Message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    opening: list[Message] = [{"role": "user", "content": "Hello."}]
    for renderer, extends in ((kept, True), (found("qwen3"), False)):
        dialogue = Dialogue.begin(opening, (), renderer)
        assert dialogue.after(renderer.encode(message), message, opening, renderer).extends == extends


def test_a_system_prompt_opens_every_context() -> None:
    renderer = find("qwen3", system="Speak like a pirate.")
    assert renderer is not None
    text = family_tokenizer("qwen3").decode(renderer.start([{"role": "user", "content": "Hello."}], ()))
    assert text.startswith("<|im_start|>system\nSpeak like a pirate.<|im_end|>")


def test_without_the_package_nothing_is_found_and_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, plain = family_tokenizer("qwen3"), family_tokenizer("gemma")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find("qwen3") is None
    assert "pip install 'agentrl[renderers]'" in str(missing_package(tokenizer, tokenizer.chat_template))
    assert missing_package(plain, plain.chat_template) is None


def test_harmony_s_vocabulary_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be downloaded, which hangs without a network."""

    def refuse(*_: object) -> None:
        raise builtins.AssertionError("asked for the vocabulary")

    monkeypatch.setattr("openai_harmony.load_harmony_encoding", refuse)
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", refuse)
    assert find("gptoss") is None
