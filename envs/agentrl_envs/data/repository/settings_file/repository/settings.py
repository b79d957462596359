"""Settings: a line `key = value` for each, and comments from `#` to the end of a line."""


def read_settings(text):
    """Return the settings by key; the last line of a key holds."""
    settings = {}
    for line in text.splitlines():
        line = without_comment(line).strip()
        if not line:
            continue
        key, value = line.split("=")
        settings[key.strip()] = value.strip()
    return settings


def without_comment(line):
    """Return a line up to its comment."""
    return line.split("#")[0]
