"""Basic regular expressions, matched in time that grows with text times pattern: Python's own can take for ever."""

from collections.abc import Callable
from typing import NamedTuple

from agentrl_envs.sandboxes.mini_tree import ShellError


class _Item(NamedTuple):
    characters: frozenset[str] | None
    """None: any."""
    is_negated: bool
    is_repeated: bool
    """With `*`."""

    def takes(self, character: str) -> bool:
        return self.characters is None or (character in self.characters) != self.is_negated


class Pattern:
    """Letters, `.`, `[a-z]`, `[^a-z]`, each maybe with `*`, between `^` and `$`; a backslash takes away a meaning."""

    def __init__(self, source: str, *, spend: Callable[[int], None], ignores_case: bool = False) -> None:
        self._spend = spend
        self._ignores_case = ignores_case
        source = source.lower() if ignores_case else source
        self._at_start = source.startswith("^")
        self._at_end = source.endswith("$") and not source.endswith("\\$")
        self._items = _items(source[self._at_start : len(source) - self._at_end])

    def find(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Return the first match from a place on, as long as it can be. None: there is none."""
        text = text.lower() if self._ignores_case else text
        self._spend(1 + len(text) // 100)
        for begin in range(start, 1 if self._at_start else len(text) + 1):
            if (end := self._end(text, begin)) is not None:
                return begin, end
        return None

    def replace(self, text: str, new: str, *, all_of_them: bool) -> str:
        """Return text with the first match, or each, replaced; `&` in `new` is the match."""
        out: list[str] = []
        at = 0
        while at <= len(text) and (found := self.find(text, at)):
            begin, end = found
            put = new.replace("&", text[begin:end])
            self._spend(1 + len(put))
            out += [text[at:begin], put]
            at = end
            if begin == end:  # of nothing: step over a letter
                out.append(text[at : at + 1])
                at += 1
            if not all_of_them:
                break
        return "".join([*out, text[at:]])

    def _end(self, text: str, begin: int) -> int | None:
        """Return where the longest match that begins here ends, walking all ways at once."""
        last, states = None, self._closed({0})
        for at in range(begin, len(text) + 1):
            self._spend(1 + len(self._items))
            if len(self._items) in states and (at == len(text) or not self._at_end):
                last = at
            if at == len(text) or not states:
                break
            taken = {k for k in states if k < len(self._items) and self._items[k].takes(text[at])}
            states = self._closed({k if self._items[k].is_repeated else k + 1 for k in taken})
        return last

    def _closed(self, states: set[int]) -> set[int]:
        """Return states with those that follow without a letter."""
        for k, item in enumerate(self._items):
            if k in states and item.is_repeated:
                states.add(k + 1)
        return states


def _items(source: str) -> list[_Item]:
    items: list[_Item] = []
    at = 0
    while at < len(source):
        characters: frozenset[str] | None = frozenset(source[at])
        is_negated, after = False, at + 1
        if source[at] == ".":
            characters = None
        elif source[at] == "\\" and after < len(source):
            if source[after] in "(){}|+?<>":
                raise ShellError(f"\\{source[after]} is not known here; letters, '.', '[...]', '*', '^' and '$' are")
            characters, after = frozenset(source[after]), at + 2
        elif source[at] == "[":
            characters, is_negated, after = _class(source, at)
        is_repeated = source[after : after + 1] == "*"
        items.append(_Item(characters, is_negated, is_repeated))
        at = after + is_repeated
    return items


def _class(source: str, at: int) -> tuple[frozenset[str], bool, int]:
    """Read `[...]`: its characters, whether they are excluded, and where it ends."""
    is_negated = source[at + 1 : at + 2] == "^"
    begin = at + 1 + is_negated
    end = source.find("]", begin + 1)
    if end < 0:
        raise ShellError("unmatched [ in a pattern")
    inner, characters, k = source[begin:end], set(), 0
    if "[:" in inner:
        raise ShellError("[:...:] is not known here; name the letters, as in [0-9]")
    while k < len(inner):
        if inner[k + 1 : k + 2] == "-" and k + 2 < len(inner):
            characters |= {chr(code) for code in range(ord(inner[k]), min(ord(inner[k + 2]) + 1, ord(inner[k]) + 256))}
            k += 3
        else:
            characters.add(inner[k])
            k += 1
    return frozenset(characters), is_negated, end + 1
