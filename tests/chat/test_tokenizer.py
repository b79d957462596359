from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import local_folder, train_tokenizer
from agentrl.chat.tokenizer import SPECIAL_TOKENS, _unreachable
from agentrl.errors import ConfigError

TOKENIZER = train_tokenizer(["open_box(box: integer) 12"] * 9, vocab_size=320)


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_is_given_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_digits_and_signs_of_arithmetic_stand_alone_and_phrases_become_one_token() -> None:
    assert TOKENIZER.tokenize("open_box(box: integer) 12") == ["open_box", "(", "box:Ġinteger", ")", "Ġ", "1", "2"]


def test_special_tokens_come_first_and_are_one_token_each() -> None:
    assert [TOKENIZER.encode(token, add_special_tokens=False) for token in SPECIAL_TOKENS] == [[i] for i in range(5)]
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|endoftext|>", "<|im_end|>")


@pytest.mark.parametrize("size", [261, 265])
def test_the_vocabulary_keeps_to_its_size(size: int) -> None:
    assert len(train_tokenizer(["a phrase that could be merged much further"] * 9, vocab_size=size)) == size


def test_the_same_texts_give_the_same_tokenizer() -> None:
    texts = ["open_box(box: integer) 12", "open_door()", "nothing"] * 3
    first, second = (train_tokenizer(iter(texts), vocab_size=300).get_vocab() for _ in range(2))
    assert first == second


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The cache of a machine that does not reach the hub."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    _unreachable.cache_clear()
    yield tmp_path
    _unreachable.cache_clear()


def test_a_model_of_the_hub_is_refused_at_once_while_offline(offline: Path) -> None:
    with pytest.raises(ConfigError) as error:
        local_folder("owner/model", field="signals.teacher")
    words = str(error.value)
    assert words.startswith(
        "signals.teacher: 'owner/model' is not in the cache of Hugging Face, and http://127.0.0.1:9 cannot"
    )
    assert words.endswith("connect, or copy the model here. A folder of this name is given as ./owner/model")
    assert "\n" not in words


def test_a_model_of_the_cache_is_found_while_offline(offline: Path) -> None:
    snapshot = offline / "models--owner--model" / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (offline / "models--owner--model" / "refs").mkdir()
    (offline / "models--owner--model" / "refs" / "main").write_text("a1")
    assert local_folder("owner/model") == snapshot
