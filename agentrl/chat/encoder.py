"""Text to tokens on any thread, beside the event loop."""

import json
import re
import threading
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from agentrl.plain_data import well_formed

MARK = "\ufdd0"
"""Within what spells a control token and is text: a code point that no text has."""
_COMPOSED = 4
"""Characters that Unicode's canonical composition (NFC) makes one of, at most."""


class Encoder:
    """What a tokenizer makes of text: without truncation and padding, and nothing added.

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
        tokens = {text: i for text, (i, token) in added.items() if _steers(token, text, spelled)}
        self.control_tokens: dict[str, int] = tokens
        """Added tokens that steer a dialogue, with their ids."""
        longest_first = sorted(tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self._own: Tokenizer | None = None
        self.max_chars: int | None = None
        """Longest text that one token stands for, in characters. None: not known, because some text may leave no token."""
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
            return
        own = Tokenizer.from_str(backend.to_str())
        own.no_truncation()
        own.no_padding()
        own.encode_special_tokens = not control
        if not control or _ids(own, _PROBE) == tuple(tokenizer.encode(_PROBE, add_special_tokens=False)):
            self._own, self.max_chars = own, _max_chars(own)

    def literal(self, text: str) -> str:
        """Mark what spells a control token, so that encoded it stays text: nobody's words end a turn or begin one."""
        text = text.replace(MARK, "\ufffd")
        return self._control.sub(lambda found: found[0][0] + MARK + found[0][1:], text) if self._control else text

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text; what `literal` marked in it is none of the control tokens."""
        if MARK in text:
            return tuple(i for piece in text.split(MARK) for i in self(piece))
        text = well_formed(text)  # half a surrogate pair, as in some file names, has no bytes
        if self._own is not None:
            return _ids(self._own, text)
        with self._lock:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))


_PROBE = "<|im_start|>user\nWhat's 12 + 3?\n\n  <s>é\u0301 世界 \U0001f600</s>\t<|endoftext|>"


def _steers(token: Any, text: str, spelled: str) -> bool:
    """Tell whether an added token is a control token, and none of the words or spaces that some vocabularies add."""
    return len(text.strip()) > 1 and (token.special or text in spelled)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return tuple(found.ids)


def _max_chars(tokenizer: Tokenizer) -> int | None:
    """Return the longest text that one token stands for, where each character is sure to be in a token: BPE over bytes."""
    form = json.loads(tokenizer.to_str())
    normalizer, splits = form["normalizer"], form["pre_tokenizer"] or {}
    splits = splits.get("pretokenizers", [splits])
    is_whole = (
        form["model"]["type"] == "BPE"
        and any(split.get("type") == "ByteLevel" for split in splits)
        and all(split.get("type") in ("ByteLevel", "Digits", "Split") for split in splits)
        and all(split.get("behavior") != "Removed" for split in splits)
        and (normalizer is None or normalizer["type"] == "NFC")
        and not any(token["lstrip"] or token["rstrip"] for token in form["added_tokens"])
    )
    if not is_whole:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None
    longest = max(map(len, vocabulary))  # a piece has a character for each byte, and each character has a byte at least
    return longest * (1 if normalizer is None else _COMPOSED)
