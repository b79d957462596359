"""Size of the documents: 22 pages and 32,000 words, so that a reader finds what there is."""

from tests.support.docs import PAGES, ROOT


def test_docs_have_at_most_22_pages_and_32000_words() -> None:
    pages = [page for page in PAGES if page.parent == ROOT / "docs"]
    assert len(pages) <= 22
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 32_000
