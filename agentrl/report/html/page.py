"""One self-contained page of HTML: its style, its scripts and its data in one file that asks for nothing else.

What models, tools and environments say is data: it travels as JSON in a `<script>` that no browser runs, and `page.js` puts
it into the page as text. Scripts run by their hash alone, so that no markup that slipped in could.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from agentrl.data.files import write_whole

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M2 13 6 7l3 3 5-8' "
    "fill='none' stroke='%233565d8' stroke-width='2.4' stroke-linecap='round' stroke-linejoin='round'/%3E%3C/svg%3E"
)


def write_page(
    out: Path,
    *,
    title: str,
    data: Any,
    scripts: Sequence[str],
    styles: Sequence[str] = (),
    blocks: Iterable[bytes] = (),
) -> Path:
    """Write a page, and return its path.

    A page begins with an empty `<main id="page">`, which its scripts fill. `page.js` comes before them and has what they need:
    `pageData(revive)` (what is given as `data`; `revive` is that of `JSON.parse`), `el(tag, attributes, ...children)` (an
    element, whose children are elements or text), `shown(number)`, and `lineChart({title, curves, ...})` (a figure with uPlot,
    as `page.js` says). `page.css` has the colours and the style of headings, cards, tables and charts, light and dark.

    Args:
        out: the file.
        title: of the page.
        data: anything that JSON can say; what is not finite becomes null.
        scripts: the page's own code, as JavaScript.
        styles: the page's own style, as CSS.
        blocks: more data, which `blockText(number)` decompresses once it is looked at.
    """
    write_whole(
        out, (part.encode() for part in page(title=title, data=data, scripts=scripts, styles=styles, blocks=blocks))
    )
    return out


def page(
    *,
    title: str,
    data: Any,
    scripts: Sequence[str],
    styles: Sequence[str] = (),
    blocks: Iterable[bytes] = (),
    connects: bool = False,
) -> Iterator[str]:
    """Yield the parts of a page.

    Args:
        title: as for `write_page`, and what follows.
        data: anything that JSON can say.
        scripts: the page's own code.
        styles: the page's own style.
        blocks: gzip, each of a text.
        connects: the page may ask the server that it came from, and nobody else, for more.
    """
    style = "\n".join([asset("uplot.min.css"), asset("page.css"), *styles])
    code = [asset("uplot.min.js"), asset("page.js"), *scripts]
    policy = content_security_policy(code, style, connects=connects)
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f'<title>{html.escape(title)}</title>\n<link rel="icon" href="{html.escape(_ICON)}">\n'
        f'<style>{style}</style>\n</head>\n<body>\n<main id="page"></main>\n'
        "<noscript>This page draws itself with JavaScript, which is switched off here.</noscript>\n"
        f'<script type="application/json" id="data">{safe_json(data)}</script>\n'
    )
    for script in code:
        yield f"<script>{script}</script>\n"
    for number, block in enumerate(blocks):  # behind the scripts: the page is there while these are still read
        yield f'<script type="text/plain" id="block-{number}">{base64.b64encode(block).decode()}</script>\n'
    yield "</body>\n</html>\n"


def content_security_policy(scripts: Sequence[str], style: str, *, connects: bool = False) -> str:
    """Return a policy that lets these scripts run and this style apply, and nothing else be loaded or run."""
    hashes = " ".join(map(_hash, scripts))
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {hashes}",
            f"style-src {_hash(style)}",
            "img-src data:",
            *(["connect-src 'self'"] if connects else []),
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def safe_json(data: Any) -> str:
    """Return JSON, in ASCII, that ends no element and begins none; what is not finite becomes null."""
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    """Return a file of this package's assets."""
    return (files("agentrl.report.html") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value
