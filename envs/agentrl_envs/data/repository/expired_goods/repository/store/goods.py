"""Goods and when they expire."""

from datetime import date


class Good:
    """Something in the store."""

    def __init__(self, name, expires):
        self.name = name
        self.expires = date.fromisoformat(expires)

    def has_expired(self, today):
        """Return whether it is too old to be sold."""
        return self.expires <= today

    def __repr__(self):
        return f"Good({self.name!r}, {self.expires.isoformat()!r})"
