"""Rows of a table of sales."""


def rows(text):
    """Yield (seller, amount) for each line after the head."""
    for line in text.strip().splitlines()[1:]:
        seller, amount = line.split(",")
        yield seller, float(amount)
