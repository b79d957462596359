"""Text to tokens on any thread, beside the event loop."""

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby, product
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from agentrl.data.plain import well_formed

MARK = "\ufdd0"
"""Within what spells a control token and is text: a code point that no text has."""
_ESCAPED = "\\ufdd0"
"""The mark as templates write it that escape what is not printed."""
SIGN = "\ufdd1"
"""Before a control token that a template spells itself: another code point that no text has."""
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
        signs = [token for token in longest_first if not token.isalnum()]  # a word may be code of a template
        self._in_brackets = re.compile(
            "|".join(pattern for token in tokens for pattern in _in_brackets(token)) or r"\Z."
        )
        self._to_sign = re.compile("|".join(map(re.escape, signs)) or r"\Z.")
        self._signed_or_not = re.compile(f"({SIGN}?)({self._spelled.pattern})|{SIGN}")
        self._own: Tokenizer | None = None
        self.max_chars: int | None = None
        """Longest text that one token stands for, in characters. None: not known, because some text may leave no token."""
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            own = _copy(backend, tokens)
            own.encode_special_tokens = not control
            if not control or _ids(own, _PROBE) == tuple(tokenizer.encode(_PROBE, add_special_tokens=False)):
                self._own, self.max_chars = own, _max_chars(own)
        self._line = self._ids("\n")
        behind = self._ids("\na")
        self._adds_space = behind[: len(self._line)] == self._line and behind[len(self._line) :] != self._ids("a")

    def literal(self, text: str) -> str:
        """Mark what spells a control token, so that encoded it stays text: nobody's words end a turn or begin one."""
        return self._spelled.sub(_mark, _sanitized(text))

    def literal_key(self, text: str) -> str:
        """Mark what spells a control token in a key, unless it is a word: templates ask for some keys."""
        return self._to_sign.sub(_mark, _sanitized(text))

    def literal_within(self, text: str) -> str:
        """Mark also what would spell a control token between brackets that a program writes around it."""
        return self._in_brackets.sub(_mark, self.literal(text))

    def signed(self, text: str) -> str:
        """Sign the control tokens in a trusted text, which is a chat template or what a form of calls adds."""
        return self._to_sign.sub(lambda found: SIGN + found[0], text)

    def unsigned(self, rendered: str) -> set[str]:
        """Return the control tokens that a rendered text spells without a sign."""
        return {found[2] for found in self._signed_or_not.finditer(rendered) if found[2] and not found[1]}

    def trusted(self, rendered: str, *, assembled: Collection[str] = ()) -> str:
        """Return a rendered text in which trusted control tokens alone are such; all others are marked as text.

        Args:
            rendered: by a signed template, with marked texts.
            assembled: control tokens that the template makes of pieces, which bear no sign.
        """

        def told_apart(found: re.Match[str]) -> str:
            sign, token = found[1], found[2]
            if not token:
                return ""
            return token if sign or token in assembled else token[0] + MARK + token[1:]

        return self._signed_or_not.sub(told_apart, self.marks(rendered))

    def marks(self, rendered: str) -> str:
        """Return a text with the marks as marks, that a template has written as an escape sequence."""
        return rendered.replace(_ESCAPED, MARK)

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
    return map_strings(data, lambda text: text.replace(MARK, ""))


def map_strings(data: Any, change: Callable[[str], str], *, key: Callable[[str], str] | None = None) -> Any:
    """Return data with each string changed, and each key, maybe by a function of its own."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, list | tuple):
        return [map_strings(item, change, key=key) for item in data]
    if not isinstance(data, dict):
        return data
    return {map_strings(k, key or change): map_strings(v, change, key=key) for k, v in data.items()}


def _mark(found: re.Match[str]) -> str:
    return found[0][0] + MARK + found[0][1:]


def _sanitized(text: str) -> str:
    return text.replace(MARK, "\ufffd").replace(SIGN, "\ufffd")


def _in_brackets(token: str) -> Iterator[str]:
    """Yield patterns of texts that lack some of the brackets of a control token, at either end or at both."""
    left, right = (len(text) - len(text.lstrip("<|>/[]｜")) for text in (token, token[::-1]))
    for start, end in product(range(left + 1), range(right + 1)):
        inner = re.escape(token[start : len(token) - end])
        if inner and (start or end):
            yield (r"\A" if start else "") + inner + (r"\Z" if end else "")


_PROBE = "<|im_start|>user\nWhat's 12 + 3?\n\n  <s>é\u0301 世界 \U0001f600</s>\t<|endoftext|>"


def _steers(token: Any, text: str, spelled: str) -> bool:
    """Return whether an added token is a control token, and none of the words or spaces that some vocabularies add."""
    return len(text.strip()) > 1 and (token.special or text in spelled)


_COMPOSING = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Sequence"}
"""Normalizers that may make a control token of other characters, and depend on no place in a text."""


def _copy(tokenizer: Tokenizer, control: Collection[str]) -> Tokenizer:
    """Return a tokenizer that encodes alike, without truncation, padding and what is put around a text.

    Both have one vocabulary, where that gives the added tokens the same ids: writing and reading a large one takes seconds.
    Control tokens are what spells them before a normalizer composes a text: a Kelvin sign is no K of theirs.
    """
    added = tokenizer.get_added_tokens_decoder()
    kinds = (
        set(re.findall(r'"type":\s*"(\w+)"', str(tokenizer.normalizer.__getstate__())))
        if tokenizer.normalizer
        else set()
    )
    if kinds and kinds <= _COMPOSING:
        added = {i: _uncomposed(token) if token.content in control else token for i, token in added.items()}
    made = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        made.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        made.pre_tokenizer = tokenizer.pre_tokenizer
    made.add_tokens([token for _, token in sorted(added.items())])
    if {i: repr(token) for i, token in made.get_added_tokens_decoder().items()} == {
        i: repr(token) for i, token in added.items()
    }:
        return made
    whole = json.loads(tokenizer.to_str())
    for entry in whole["added_tokens"]:
        entry["normalized"] = added[entry["id"]].normalized
    made = Tokenizer.from_str(json.dumps(whole))
    made.no_truncation()
    made.no_padding()
    return made


def _uncomposed(token: AddedToken) -> AddedToken:
    sides = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return AddedToken(token.content, **sides, normalized=False, special=token.special)


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
