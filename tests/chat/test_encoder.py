"""Text becomes the tokens of its tokenizer on any thread, and a bound on what one token stands for is one."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.chat import train_tokenizer
from agentrl.chat.encoder import Encoder

PLAIN = train_tokenizer(["the box is empty, the door is locked"] * 20, vocab_size=300)
COMPOSING = train_tokenizer(["a\u0302 the box"] * 20, vocab_size=280)
COMPOSING.backend_tokenizer.normalizer = normalizers.NFC()
ENCODE = {"plain": Encoder(PLAIN), "no control": Encoder(PLAIN, control=False), "composing": Encoder(COMPOSING)}


@pytest.mark.parametrize("name", ENCODE)
@given(text=st.one_of(st.text(), st.text("\u03b1\u0313\u0300\u0345 a\u0302\n"), st.text("the box door  ")))
def test_no_token_stands_for_more_text_than_the_bound(name: str, text: str) -> None:
    encode = ENCODE[name]
    assert encode.max_chars is not None
    assert len(text) <= encode.max_chars * len(encode(text))


@given(text=st.text())
def test_tokens_are_those_of_the_tokenizer(text: str) -> None:
    assert ENCODE["plain"](text) == tuple(PLAIN.encode(text, add_special_tokens=False))


def wordpiece() -> Any:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def dropping() -> Any:
    tokenizer = PLAIN.backend_tokenizer.from_str(PLAIN.backend_tokenizer.to_str())
    splits = [pre_tokenizers.Split(" ", behavior="removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return tokenizer


@pytest.mark.parametrize("make", [wordpiece, dropping])
def test_where_text_may_leave_no_token_there_is_no_bound(make: Any) -> None:
    encode = Encoder(PreTrainedTokenizerFast(tokenizer_object=make()))
    assert encode.max_chars is None
    encode("a a")


def test_many_threads_encode_while_another_user_changes_the_tokenizer() -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    encode = Encoder(tokenizer)
    texts = [f"{number} boxes" * 50 for number in range(200)]
    expected = [encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(encode, texts)
        for number in range(200):
            tokenizer("some boxes", truncation=True, max_length=1 + number % 5)
        assert list(found) == expected
