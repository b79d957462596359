"""What is in a journal's files once it has been closed, and what is read of them."""

import asyncio
from pathlib import Path

from agentrl.rollout.journal import Dropped, Event, Journal, Restarted, Started


def test_what_was_noted_in_the_last_round_of_the_event_loop_is_written_by_closing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "journal")
    events: list[Event] = [
        Restarted(settings="x"),
        Dropped(group="g", counts={"failed": 2}),
        Started(index=1, version=2),
    ]

    async def note() -> None:
        assert journal.begin() == 1
        for event in events:
            journal.write(event)
        journal.close()  # before the loop has another round

    asyncio.run(note())
    assert list(journal.read_events(1)) == events
    (path,) = (tmp_path / "run" / "journal").iterdir()
    assert all(line.count('"kind"') == 1 for line in path.read_text(encoding="utf-8").splitlines())


def test_without_the_file_that_a_checkpoint_names_nothing_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in (1, 2):
        assert journal.begin() == number
        journal.write(Started(index=0, version=number))
    journal.close()
    assert [event.version for event in journal.read_events(1) if isinstance(event, Started)] == [1, 2]
    min(tmp_path.iterdir()).unlink()
    assert list(journal.read_events(1)) == []
    assert len(list(journal.read_events(2))) == 1
