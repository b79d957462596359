"""Templates with tokenizers of every kind: contexts are what the tokenizer's own template gives, whoever says what."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from agentrl.chat import AutoConfig, Dialogue, TemplateConfig, TemplateRenderer
from agentrl.chat.encoder import Encoder
from agentrl.errors import RendererError
from agentrl.types import Message
from tests.support.each import each
from tests.support.families import (
    FAMILIES,
    family_tokenizer,
    make_tokenizer,
    mistral_tokenizer,
    qwen_tokenizer,
    templates_folder,
)
from tests.support.templates import QWEN, tokenizer

HELLO: Message = {"role": "user", "content": "Hello."}
YES: Message = {"role": "assistant", "content": "Yes, it is."}
ODD = "  two spaces, 🦊 naïve\n\n鍵 "


def whole(tokenizer: Any, *messages: Message) -> tuple[int, ...]:
    if TemplateRenderer(tokenizer).template.shape.parts:
        messages = tuple({**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages)
    return tuple(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))


def extended(renderer: TemplateRenderer, *replies: Message) -> tuple[int, ...]:
    dialogue = Dialogue.begin([HELLO], (), renderer)
    return dialogue.after(renderer.encode(YES), YES, replies, renderer).context_ids


@each("name", ["llama3", "gemma3", "cohere", "deepseekv3", "llava_next", "phi3_5", "qwen2_5"])
def test_a_context_begins_with_the_bos_token_as_often_as_the_template_writes_it(name: str) -> None:
    made = family_tokenizer(name)
    start = TemplateRenderer(made).start([HELLO], ())
    assert start == whole(made, HELLO)
    assert start.count(made.bos_token_id) == (made.bos_token is not None and "bos_token" in made.chat_template)


def test_a_template_without_a_bos_token_has_none_though_the_tokenizer_adds_one() -> None:
    made = make_tokenizer(replace(FAMILIES["phi3"], adds_bos=True))
    made.chat_template = (templates_folder() / "phi3.jinja").read_text(encoding="utf-8")
    assert made.encode("a")[0] == made.bos_token_id
    assert made.bos_token_id not in TemplateRenderer(made).start([HELLO], ())


@pytest.mark.slow
@each("name", ["llava_next", "phi3", "gemma3", "llama3", "smolvlm", "qwen2_5"])
@each("content", ["And now?", ODD, "", " "])
def test_no_space_is_lost_or_added_where_pieces_meet(name: str, content: str) -> None:
    made = family_tokenizer(name)
    renderer, more = TemplateRenderer(made), {"role": "user", "content": content}
    assert extended(renderer, more) == whole(made, HELLO, YES, more)
    # Words that spell a control token are encoded in pieces.
    encode = Encoder(made, spelled=made.chat_template)
    for token in encode.control_tokens:
        hostile = f"a {token}{content}b"
        ids = encode(encode.literal(hostile))
        assert encode.control_tokens[token] not in ids
        assert made.decode(ids, clean_up_tokenization_spaces=False) == hostile


@pytest.mark.parametrize("name", ["llava_next", "gemma3"])
def test_a_character_that_was_sampled_in_bytes_is_read_and_half_of_one_is_data(name: str) -> None:
    made = family_tokenizer(name)
    renderer = TemplateRenderer(made)
    message = {"role": "assistant", "content": "a 🦊 b"}
    action = renderer.encode(message)
    assert made.convert_ids_to_tokens(list(action)).count("<0x9F>") == 1
    assert renderer.parse(action) == message
    for length in range(len(action)):
        assert renderer.parse(action[:length])["content"].startswith(("", "a"))


def test_control_tokens_may_take_the_space_around_them_into_themselves() -> None:
    made = tokenizer(QWEN)
    made.add_tokens(
        [
            AddedToken("<|aside|>", lstrip=True, rstrip=True, special=True, normalized=True),
            AddedToken("word", single_word=True),
            AddedToken("  ", normalized=False),
        ]
    )
    renderer = TemplateRenderer(made)
    more = {"role": "user", "content": "a word, words,  and two spaces"}
    assert extended(renderer, more) == whole(made, HELLO, YES, more)
    aside = made.convert_tokens_to_ids("<|aside|>")
    for content in ("a <|aside|> b", "<|aside|>", "  <|aside|>\n"):
        start = renderer.start([{"role": "user", "content": content}], ())
        assert aside not in start
        assert content in made.decode(start, clean_up_tokenization_spaces=False)


@each("scheme", ["always", "first", "never"])
def test_a_space_before_a_text_stands_only_there(scheme: Any) -> None:
    alphabet = [*"▁abcdefghijklmnopqrstuvwxyzHY.,|<>_\n\x12/", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", left=1)] if scheme != "never" else [])])
    backend.normalizer = normalizers.Sequence([])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    made.chat_template = QWEN
    renderer, more = TemplateRenderer(made), {"role": "user", "content": " and now?"}
    assert extended(renderer, more) == whole(made, HELLO, YES, more)
    encode = Encoder(made)
    assert made.decode(list(encode(encode.literal("a<|im_end|>b")))) == "a<|im_end|>b"


def test_a_slow_tokenizer_has_its_words_and_control_tokens_told_apart() -> None:
    made = ByT5Tokenizer(additional_special_tokens=["<|im_start|>", "<|im_end|>"], extra_ids=0)
    made.chat_template = QWEN
    renderer = AutoConfig().build(made, name="slow")
    assert isinstance(renderer, TemplateRenderer)
    end = Encoder(made).control_tokens["<|im_end|>"]
    assert renderer.stop_token_ids == (end, made.eos_token_id)
    assert extended(renderer, HELLO) == whole(made, HELLO, YES, HELLO)
    assert made.eos_token_id not in renderer.start([{"role": "user", "content": "a </s> b"}], ())
    assert renderer.parse((*made.encode("ab", add_special_tokens=False), 10**6, end)) == {
        "role": "assistant",
        "content": "ab",
    }


def test_the_template_of_another_family_is_refused_by_name() -> None:
    made = make_tokenizer(FAMILIES["llama3"])
    made.chat_template = (templates_folder() / "qwen3.jinja").read_text(encoding="utf-8")
    assert len(made.encode("<|im_end|>", add_special_tokens=False)) > 1
    with pytest.raises(
        RendererError, match=r"'org/llama' ends a turn of the assistant with '<\|im_end\|>.*by one token"
    ):
        AutoConfig().build(made, name="org/llama")


def test_a_tokenizer_that_renders_by_itself_is_refused_by_name() -> None:
    pytest.importorskip("mistral_common", reason="mistral-common comes with vLLM")
    made = mistral_tokenizer()
    with pytest.raises(RendererError, match=r"chat\.renderer: .*chat\.template"):
        AutoConfig().build(made, name="org/mistral")


@pytest.mark.slow
def test_qwen_s_own_vocabulary_is_accepted() -> None:
    if importlib.util.find_spec("dashscope") is None:
        pytest.skip("without dashscope: pip install --no-deps --requirement requirements-families.txt")
    made = qwen_tokenizer("qwen2_5")
    renderer = TemplateConfig().build(made, name="Qwen")
    assert renderer.stop_token_ids == (151645,)
    assert isinstance(renderer, TemplateRenderer)
    more = {"role": "user", "content": ODD}
    assert extended(renderer, more) == whole(made, HELLO, YES, more)


def test_a_copy_of_an_encoder_shares_no_truncation_with_its_tokenizer() -> None:
    made = family_tokenizer("qwen3")
    encode = Encoder(make := make_tokenizer(FAMILIES["qwen3"]))
    make("a b c d e", truncation=True, max_length=2)
    assert encode("a b c d e") == tuple(made.encode("a b c d e", add_special_tokens=False))


def test_what_a_template_escapes_is_told_apart_all_the_same() -> None:
    """LFM2's template writes texts within lists as Python does, which escapes the mark."""
    made = family_tokenizer("lfm2_2_5")
    encode, renderer = Encoder(made, spelled=made.chat_template), TemplateRenderer(made)
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"a": ["<|im_end|>"]}}}
    action = renderer.encode({"role": "assistant", "content": "", "tool_calls": [call]})
    assert encode.control_tokens["<|im_end|>"] not in action[:-1]
    assert "\ufdd0" not in str(renderer.parse(action))


def test_words_that_spell_the_stand_in_are_heard() -> None:
    renderer = TemplateRenderer(family_tokenizer("qwen2_5"))
    more = {"role": "user", "content": "before agentrl-probe after"}
    assert extended(renderer, more) == whole(family_tokenizer("qwen2_5"), HELLO, YES, more)
