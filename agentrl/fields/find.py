"""Which sections and fields someone asks for by a name."""

from collections.abc import Sequence

from agentrl.fields.listing import Field, Section

Found = list[tuple[Section, tuple[Field, ...]]]


def find(what: str, sections: Sequence[Section]) -> Found:
    """Return the sections of a path with all their fields; else a plug-in's (`credit.gigpo`, `gigpo`), and single fields."""
    if not what:
        return [(section, section.fields) for section in sections]
    if within := [s for s in sections if s.path == what or s.path.startswith(f"{what}.")]:
        return [(section, section.fields) for section in within]
    seam, _, name = what.rpartition(".")
    plugins = [(s, s.fields) for s in sections if s.plugin == name and s.path.startswith(seam)]
    chosen = ((s, tuple(f for f in s.fields if what in (f.path, f.name))) for s in sections)
    return [*plugins, *((section, fields) for section, fields in chosen if fields)]
