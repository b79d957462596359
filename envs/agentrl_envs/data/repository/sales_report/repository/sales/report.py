"""A report on sales."""

from sales.rows import rows


def report(text):
    """Return the lines of the report: its head, sellers by name with their share, total, and mean of a sale."""
    sales = rows(text)
    amounts = [amount for _, amount in sales]
    total = sum(amounts)
    by_seller = {}
    for seller, amount in sales:
        by_seller[seller] = by_seller.get(seller, 0) + amount
    lines = [f"{len(amounts)} sales"]
    lines += [f"{seller}: {100 * amount / total:.1f} %" for seller, amount in sorted(by_seller.items())]
    mean = total / len(amounts) if amounts else 0
    return [*lines, f"total {total:.2f}", f"mean {mean:.2f}"]
