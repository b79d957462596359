"""A cache that forgets what was not used for longest."""

from recent.cache import Cache
