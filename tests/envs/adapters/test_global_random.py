import os
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from agentrl import EnvironmentFailure
from agentrl_envs.adapters import common as global_random
from agentrl_envs.adapters.common import OwnRandom


@pytest.fixture
def hanging() -> Iterator[None]:
    """A source that hangs in another thread."""
    begun, end = threading.Event(), threading.Event()

    def hang() -> None:
        with OwnRandom().in_use("the game Hangs"):
            begun.set()
            end.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    begun.wait()
    yield
    end.set()
    thread.join()


@pytest.mark.usefixtures("hanging")
def test_a_source_that_hangs_fails_the_others_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_random, "_MAX_HELD_S", 0.3)
    words = "the game Other cannot draw random numbers: the game Hangs has had the process's for more than 0.3 s"
    with pytest.raises(EnvironmentFailure, match=words), OwnRandom().in_use("the game Other"):
        pass


@pytest.mark.process
@pytest.mark.usefixtures("hanging")
def test_a_fork_waits_for_nobody() -> None:
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(50)  # ends it, where it waits
        with OwnRandom().in_use("the game Other"):
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_source_that_calls_itself_has_them_until_it_is_done() -> None:
    source, expected = OwnRandom(3), random.Random(3)
    before = random.getstate()
    with source.in_use("outer"):
        assert random.random() == expected.random()
        with OwnRandom(4).in_use("inner"):
            assert random.random() == random.Random(4).random()
        assert random.random() == expected.random()
    assert random.getstate() == before
    assert global_random._holder is None
