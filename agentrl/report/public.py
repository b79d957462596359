"""A recipe as others may read it: without secrets, and without the names of machines and folders."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SECRET = re.compile(
    r"(^|[_-])((api|access|private|secret|auth|bearer|hf)[_-]?(key|token)|secret|credentials?|auth|authorization|cookies?)$"
    r"|^key$|pass(word|wd|phrase)$",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"(^|.*[_-])token", re.IGNORECASE)
_TEXT_TOKEN = re.compile(
    r"(.*[_-])?(bos|cls|eos|image|mask|pad|sep|stop|unk|per|special|start|end)[_-]token", re.IGNORECASE
)
_VARIABLE = re.compile(r"[A-Z0-9_]*(KEY|TOKEN|SECRET|PASS|PWD|PAT|AUTH)")
"""An environment variable that a program reads a secret from."""
_KEY_TEXT = re.compile(r"\b(hf_|sk-|gsk_|ghp_|glpat-|github_pat_|ntn_|xox[a-z]-|AKIA|AIza|Bearer\s+)[\w.~+/=-]{8,}")
_PATH = re.compile(r"(?:~|/+[^\s\\/]+|[A-Za-z]:)[\\/](?:[^\n]*[\\/])?([^\\/\n]*)")
_HOME = re.compile(r"/+(?:home|Users)/[^/\s]+")
_HOST = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s]+", re.IGNORECASE)


def _is_secret(name: str) -> bool:
    is_token = _TOKEN.fullmatch(name) and not _TEXT_TOKEN.fullmatch(name)
    return bool(is_token or _SECRET.search(name) or _VARIABLE.fullmatch(name))


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
    if _is_secret(name):
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
