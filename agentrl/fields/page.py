"""All fields as a page of Markdown."""

from collections.abc import Iterator, Sequence

from agentrl.fields.listing import Field, Section

_HEAD = """# Fields of a recipe

Written by `agentrl fields --markdown`; `agentrl fields SECTION` prints a part of it, with the plug-ins that are installed,
and `agentrl fields --json-schema` writes the same for editors. Every field can be given on the command line:
`--rollout.group_size 4`.

*On resume*: a resumed run may change any field. Where it says *kept*, the field changes how a run is carried out, and what
was sampled since the last checkpoint is kept; where it says *sampled again*, the field changes what is learned, and those
episodes are sampled again.
"""


def page(sections: Sequence[Section]) -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(line for section in sections for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    choice = f", with `{section.choice}`" if section.choice else ""
    yield f"## {f'`{section.path}`' if section.path else 'At the top'}{choice}\n"
    yield f"{section.sentence}\n"
    if section.fields:
        yield "| field | takes | default | what it is | on resume |\n|---|---|---|---|---|"
        yield from map(_row, section.fields)
        yield ""


def _row(field: Field) -> str:
    takes = f"{field.type}{f' ({field.unit})' if field.unit else ''}"
    default = f"`{field.default}`" if field.default else "must be given"
    cells = (f"`{field.name}`", takes, default, field.sentence, field.on_resume)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
