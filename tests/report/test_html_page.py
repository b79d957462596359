"""A page as text: what a browser makes of it is in test_html_browser.py."""

import base64
import gzip
import hashlib
import html
import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agentrl.report.html.page import page, safe_json, write_page

TEXT = st.text(st.characters()) | st.sampled_from(["</script>", "<!--", "<script>", "]]>", "&lt;", "\u2028", "\ud800"])
DATA = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(DATA)
def test_json_in_a_page_means_the_same_and_holds_no_markup(data: object) -> None:
    text = safe_json(data)
    assert json.loads(text) == data
    assert text.isascii()
    assert not set(text) & set("<>&")


def test_what_is_not_finite_is_null() -> None:
    assert json.loads(safe_json({"a": [float("nan"), float("inf"), 1.5], "b": float("-inf")})) == {
        "a": [None, None, 1.5],
        "b": None,
    }


def test_the_policy_names_the_hash_of_every_script_and_of_the_style_and_nothing_that_is_not_there(
    tmp_path: Path,
) -> None:
    out = write_page(tmp_path / "a.html", title="<b>", data={}, scripts=["1 < 2;"], styles=["a{}"])
    text = out.read_text(encoding="utf-8")
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert found
    rules = dict(rule.split(" ", 1) for rule in html.unescape(found[1]).split("; "))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    for rule, inside in (
        ("script-src", re.findall("<script>(.*?)</script>", text, re.DOTALL)),
        ("style-src", re.findall("<style>(.*?)</style>", text, re.DOTALL)),
    ):
        digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in inside]
        assert rules[rule] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert "<title>&lt;b&gt;</title>" in text


def test_blocks_stand_beside_the_data() -> None:
    text = "".join(page(title="", data=[], scripts=[], blocks=[gzip.compress(b"first"), gzip.compress(b"second")]))
    found = re.findall(r'<script type="text/plain" id="block-(\d)">([^<]*)</script>', text)
    assert [(number, gzip.decompress(base64.b64decode(block))) for number, block in found] == [
        ("0", b"first"),
        ("1", b"second"),
    ]


def test_a_page_that_is_served_may_ask_its_server_and_nobody_else() -> None:
    assert "connect-src &#x27;self&#x27;;" in "".join(page(title="", data=[], scripts=[], connects=True))
