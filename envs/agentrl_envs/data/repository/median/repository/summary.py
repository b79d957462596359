"""Short descriptions of a list of numbers."""


def mean(values):
    """Return the mean.

    Raises:
        ValueError: for no values.
    """
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)


def median(values):
    """Return the value in the middle.

    Raises:
        ValueError: for no values.
    """
    values.sort()
    return values[len(values) // 2]


def spread(values):
    """Return the distance of the largest and the smallest value.

    Raises:
        ValueError: for no values.
    """
    return max(values) - min(values)
