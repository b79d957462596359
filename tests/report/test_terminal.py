import io

from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from agentrl.report.terminal import Console, printable, render
from tests.support.each import each
from tests.support.records import record, turn

HOSTILE = "\x1b]0;owned\x07a\x1b[2Jb\x9b31mc\x00d\x7fe\u202ef\u2066g\rh\x08\udc80[/red] :smile:"
HARMLESS = "]0;owneda[2Jb31mcdefgh\ufffd[/red] :smile:"


def printed(*objects: object, **options: object) -> str:
    file = io.StringIO()
    Console(file=file, width=400, **options).print(*objects)
    return file.getvalue()


def test_a_text_loses_what_a_terminal_obeys_and_nothing_else() -> None:
    assert printable(HOSTILE) == HARMLESS
    assert printable("tab\tline\nümläut 漢字 🙂") == "tab\tline\nümläut 漢字 🙂"


@each("form", [str, Text])
def test_nothing_that_is_printed_steers_the_terminal(form: type) -> None:
    table = Table("title", title=form(HOSTILE))
    table.add_row(form(HOSTILE))
    for what in (form(HOSTILE), table):
        assert HARMLESS in printed(what)
        assert not {"\x1b", "\x07", "\x9b", "\x00", "\u202e"} & set(printed(what))


def test_a_rollout_is_shown_in_our_own_colours_alone() -> None:
    hostile = turn([{"role": HOSTILE, "content": HOSTILE}, {"content": [HOSTILE]}], [HOSTILE], [1.0])
    shown = printed(render(record(hostile, error=HOSTILE, metrics={HOSTILE: 1.0})))
    assert shown.count("owned") == 6
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
    coloured = printed(render(record(hostile)), force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert "\x1b]0" not in coloured
    assert "\x1b[2J" not in coloured


def test_progress_is_stripped_too() -> None:
    file = io.StringIO()
    with Progress(TextColumn("{task.fields[note]}", markup=False), console=Console(file=file, width=400)) as progress:
        progress.add_task("", note=HOSTILE)
    assert "owned" in file.getvalue()
    assert "\x1b]0" not in file.getvalue()
