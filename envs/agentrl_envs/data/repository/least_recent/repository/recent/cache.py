"""A cache with room for some values."""


class Cache:
    """Values by key; if it is full, the one that was not used for longest is forgotten. To get or put it is to use it."""

    def __init__(self, room):
        self.room = room
        self.values = {}  # the first was not used for longest

    def get(self, key, default=None):
        """Return the value of a key, or `default` if there is none."""
        return self.values.get(key, default)

    def put(self, key, value):
        """Remember a value."""
        if len(self.values) >= self.room:
            oldest = next(iter(self.values))
            del self.values[oldest]
        self.values[key] = value

    def keys(self):
        """Return the keys; the first was not used for longest."""
        return list(self.values)
