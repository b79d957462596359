"""Pages of long lists, numbered from 1."""


def num_pages(num_items, per_page):
    """Return how many pages the items fill."""
    return num_items // per_page + 1


def page(items, number, per_page):
    """Return the items of a page."""
    start = (number - 1) * per_page
    return items[start : start + per_page]


def label(number, num_items, per_page):
    """Return the words under a page: its first and last item, and how many there are."""
    start = (number - 1) * per_page
    return f"{start}-{start + per_page} of {num_items}"
