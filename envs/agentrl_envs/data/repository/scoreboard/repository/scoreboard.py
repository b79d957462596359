"""A scoreboard, read from lines of name and points."""


def read(text):
    """Return a list of (name, points), one for each line `name: points`."""
    rows = []
    for line in text.splitlines():
        if line.strip():
            name, points = line.split(":")
            rows.append((name.strip(), points.strip()))
    return rows


def ranked(rows):
    """Return the rows, the best first."""
    return sorted(rows, key=lambda row: (row[1], row[0]), reverse=True)


def board(text):
    """Return the scoreboard as lines of place, name and points."""
    return [f"{place}. {name} {points}" for place, (name, points) in enumerate(ranked(read(text)), start=1)]
