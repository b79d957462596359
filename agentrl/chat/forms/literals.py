"""Values as Python and JSON write them, side by side: models that write calls as code mix the two."""

import re
from collections.abc import Iterator

from agentrl.plain_data import MAX_DEPTH, MAX_VALUES

_NEXT = re.compile(r"\s*+(.?)", re.DOTALL)
_STRING = re.compile(r""""((?:[^"\\]++|\\.)*+)"|'((?:[^'\\]++|\\.)*+)'""", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d++(\.\d*+)?|(\.\d++))([eE][+-]?\d++)?", re.ASCII)
_WORD = re.compile(r"[^\W\d]\w*+")
_WORDS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {c: c for c in "\\'\"/"}


class Literals:
    """Goes through a text from value to value; raises ValueError where none is."""

    def __init__(self, text: str) -> None:
        self._text, self._position, self._num_members = text, 0, 0

    def next(self) -> str:
        """Go past space and return the character that comes next; at the end of the text, nothing."""
        found = _NEXT.match(self._text, self._position)
        self._position = found.start(1) if found else self._position
        return found[1] if found else ""

    def skip(self, sign: str) -> bool:
        """Tell whether a character comes next; if so, go past it."""
        is_next = self.next() == sign
        self._position += len(sign) * is_next
        return is_next

    def expect(self, sign: str) -> None:
        """Go past a character; nothing is the end of the text."""
        if not self.skip(sign):
            raise ValueError(f"no {sign!r} at character {self._position}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return what matches next, after space, and go past it."""
        self.next()
        if found := pattern.match(self._text, self._position):
            self._position = found.end()
        return found

    def members(self, close: str) -> Iterator[None]:
        """Yield before each member, with commas between them, up to what closes them."""
        while not self.skip(close):
            self._num_members += 1
            if self._num_members > MAX_VALUES:
                raise ValueError("too many values")
            yield
            if not self.skip(","):
                self.expect(close)
                return

    def value(self, depth: int = 0) -> object:
        """Return the value that comes next."""
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if self.skip("["):
            return [self.value(depth + 1) for _ in self.members("]")]
        if self.skip("{"):
            return {self.key(): self.value(depth + 1) for _ in self.members("}")}
        if (text := self.string()) is not None:
            return text
        if number := self.match(_NUMBER):
            return (float if any(number.groups()) else int)(number[0])
        if (word := self.match(_WORD)) and word[0] in _WORDS:
            return _WORDS[word[0]]
        raise ValueError(f"no value at character {self._position}")

    def string(self) -> str | None:
        """Return the string that comes next, if one does."""
        found = self.match(_STRING)
        return None if found is None else _unescaped(found[1] if found[2] is None else found[2])

    def key(self) -> str:
        """Return the key that comes next, and go past its colon."""
        key = self.string()
        self.expect(":")
        if key is None:
            raise ValueError(f"no key at character {self._position}")
        return key


def _unescaped(text: str) -> str:
    """Return a string with what its backslashes stand for; one that stands for nothing stays, as in Python."""
    if "\\" not in text:
        return text
    text = _ESCAPE.sub(lambda e: chr(int(e[1] or e[2] or e[3], 16)) if e[4] is None else _ESCAPED.get(e[4], e[0]), text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # JSON writes pairs
