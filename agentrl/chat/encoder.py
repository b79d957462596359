"""Text to tokens on any thread, beside the event loop."""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from agentrl.data.plain import well_formed

MARK = "\ufdd0"
"""Within what spells a control token and is text: a code point that no text has."""
_ESCAPED = "\\ufdd0"
"""The mark as templates write it that escape what is not printed."""
_COMPOSED = 4
"""Characters that Unicode's canonical composition (NFC) makes one of, at most."""


class Encoder:
    """Encode text with a tokenizer: without truncation and padding, and nothing added.

    It has the tokenizer to itself, since one that is changed while another thread encodes raises "Already borrowed"; and
    the work is done in Rust, without Python's lock, so that other threads run meanwhile. A tokenizer that is no Rust one, or
    does more than its Rust part, encodes on one thread at a time.
    """

    def __init__(self, tokenizer: Any, *, control: bool = True, spelled: str = "") -> None:
        """Take a tokenizer of transformers.

        Args:
            tokenizer: of transformers; a fast one where `control` is False.
            control: text that spells a control token becomes one.
            spelled: a chat template: what it spells of the tokenizer's added tokens are control tokens too.
        """
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        added = {str(token): (i, token) for i, token in tokenizer.added_tokens_decoder.items()}
        tokens = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        tokens |= {text: i for text, (i, token) in added.items() if _steers(token, text, spelled)}
        self.control_tokens: dict[str, int] = tokens
        """Added tokens that steer a dialogue, with their ids."""
        longest_first = sorted(tokens, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, [*longest_first, _ESCAPED])))
        self._own: Tokenizer | None = None
        self.max_chars: int | None = None
        """Longest text that one token stands for, in characters. None: not known, because some text may leave no token."""
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            own = _copy(backend)
            own.encode_special_tokens = not control
            if not control or _ids(own, _PROBE) == tuple(tokenizer.encode(_PROBE, add_special_tokens=False)):
                self._own, self.max_chars = own, _max_chars(own)
        self._line = self._ids("\n")
        behind = self._ids("\na")
        self._adds_space = behind[: len(self._line)] == self._line and behind[len(self._line) :] != self._ids("a")

    def literal(self, text: str) -> str:
        """Mark what spells a control token, so that encoded it stays text: nobody's words end a turn or begin one."""
        text = text.replace(MARK, "\ufffd")
        return self._spelled.sub(lambda found: found[0][0] + MARK + found[0][1:], text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled tokens; if other tokens spell a control token in letters, it is marked.

        What was sampled in letters is then none of a form's tags: it neither ends a call nor begins one.
        """
        text, control = self._decoded(ids), set(self.control_tokens.values())
        if len(self._spelled.findall(text)) == sum(i in control for i in ids):
            return text
        pieces = groupby(ids, key=lambda i: i in control)
        return "".join(self._decoded([*p]) if steers else self.literal(self._decoded([*p])) for steers, p in pieces)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def marks(self, rendered: str) -> str:
        """Return a text with the marks as marks, that a template has written as an escape sequence."""
        return rendered.replace(_ESCAPED, MARK)

    def __call__(self, text: str, *, after: str = "") -> tuple[int, ...]:
        """Return the tokens of a text; what `literal` marked in it is none of the control tokens.

        Args:
            text: what is encoded.
            after: what stands before it, where it is no beginning: some tokenizers put a space before a text, and some
                control tokens take the white space after them into themselves.
        """
        if after:
            before, whole = self(after), self(after + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
            return tuple(
                self._continued(text.split(MARK))
            )  # the end of the one is merged with the beginning of the other
        first, *others = text.split(MARK)
        return (*self._ids(first), *self._continued(others))

    def _continued(self, pieces: Iterable[str]) -> Iterator[int]:
        """Yield the tokens of what stands behind text: without the space that some tokenizers put before a text."""
        for piece in pieces:
            ids = self._ids("\n" + piece) if self._adds_space else ()
            is_apart = self._adds_space and ids[: len(self._line)] == self._line
            yield from ids[len(self._line) :] if is_apart else self._ids(piece)

    def _ids(self, text: str) -> tuple[int, ...]:
        text = well_formed(text)  # half a surrogate pair, as in some file names, has no bytes
        if self._own is not None:
            return _ids(self._own, text)
        with self._lock:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def unmarked(data: Any) -> Any:
    """Return data without the marks in its texts."""
    if isinstance(data, str):
        return data.replace(MARK, "")
    if isinstance(data, list):
        return [unmarked(item) for item in data]
    return {unmarked(key): unmarked(value) for key, value in data.items()} if isinstance(data, dict) else data


_PROBE = "<|im_start|>user\nWhat's 12 + 3?\n\n  <s>é\u0301 世界 \U0001f600</s>\t<|endoftext|>"


def _steers(token: Any, text: str, spelled: str) -> bool:
    """Return whether an added token is a control token, and none of the words or spaces that some vocabularies add."""
    return len(text.strip()) > 1 and (token.special or text in spelled)


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that encodes alike, without truncation, padding and what is put around a text.

    Both have one vocabulary, where that gives the added tokens the same ids: writing and reading a large one takes seconds.
    """
    made, added = Tokenizer(tokenizer.model), tokenizer.get_added_tokens_decoder()
    if tokenizer.normalizer is not None:
        made.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        made.pre_tokenizer = tokenizer.pre_tokenizer
    made.add_tokens([token for _, token in sorted(added.items())])
    if {i: repr(token) for i, token in made.get_added_tokens_decoder().items()} == {
        i: repr(token) for i, token in added.items()
    }:
        return made
    made = Tokenizer.from_str(tokenizer.to_str())
    made.no_truncation()
    made.no_padding()
    return made


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return tuple(found.ids)


def _max_chars(tokenizer: Tokenizer) -> int | None:
    """Return the longest text that one token stands for, where each character is sure to be in a token: BPE over bytes."""
    normalizer, splits = (
        json.loads(part.__getstate__()) if part is not None else None
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    )
    splits = splits.get("pretokenizers", [splits]) if splits else []
    is_whole = (
        isinstance(tokenizer.model, models.BPE)
        and any(split.get("type") == "ByteLevel" for split in splits)
        and all(split.get("type") in ("ByteLevel", "Digits", "Split") for split in splits)
        and all(split.get("behavior") != "Removed" for split in splits)
        and (normalizer is None or normalizer["type"] == "NFC")
        and not any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    )
    if not is_whole:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None
    longest = max(map(len, vocabulary))  # a piece has a character for each byte, and each character has a byte at least
    return longest * (1 if normalizer is None else _COMPOSED)
