"""Shelves of goods."""


def remove_expired(shelf, today):
    """Remove the expired goods of a list, and return them."""
    removed = []
    for good in shelf:
        if good.has_expired(today):
            removed.append(good)
            shelf.remove(good)
    return removed
