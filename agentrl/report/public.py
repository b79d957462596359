"""A recipe as others may read it: without secrets, and without the names of machines and folders."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SECRET = re.compile(
    r"(^|[_-])(((api|access|private|secret|auth|bearer|hf)[_-]?)(key|token)|^key|^token|secret|pass(word|wd|phrase)|credentials?)$",
    re.IGNORECASE,
)
_KEY_TEXT = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[a-z]-|AKIA)[\w-]{8,}")
_PATH = re.compile(r"(?:~|/|[A-Za-z]:[\\/])[^\s]*[\\/](\S*)")
_HOME = re.compile(r"/+(?:home|Users)/[^/\s]+")
_HOST = re.compile(r"\b((?:https?|wss?)://)[^/\s]+")


def public(value: Any, name: str = "") -> Any:
    """Return plain data without what is private.

    That is text under a name such as `api_key`, text that looks like a key, hosts of URLs, and folders of absolute paths.

    Args:
        value: of a recipe's field, or a part of it.
        name: of the field.
    """
    if isinstance(value, Mapping):
        return {key: public(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [public(each, name) for each in value]
    return _public_text(value, name) if isinstance(value, str) else value


def _public_text(text: str, name: str) -> str:
    if _SECRET.search(name):
        return "(hidden)"
    if whole := _PATH.fullmatch(text):
        return whole[1] or "(a folder)"
    text = _HOME.sub("~", text.replace(str(Path.home()), "~"))
    return _KEY_TEXT.sub("(hidden)", _HOST.sub(r"\1(host)", text))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field by its whole name, `train.steps`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
