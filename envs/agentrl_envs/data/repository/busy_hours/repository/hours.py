"""Hours at which somebody is busy or free, as pairs of begin and end."""


def merged(meetings):
    """Return the meetings as few pairs that do not touch, in order."""
    found = []
    for begin, end in meetings:
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def free(meetings, day=(9, 17)):
    """Return the pairs of hours of a day without a meeting."""
    gaps, at = [], day[0]
    for begin, end in merged(meetings):
        if begin > at:
            gaps.append((at, begin))
        at = end
    return gaps + ([(at, day[1])] if at < day[1] else [])
