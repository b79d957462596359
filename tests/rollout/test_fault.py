import json
import threading
from collections.abc import Callable

from agentrl.errors import EnvError
from agentrl.rollout.faults import describe_error, describe_fault, thread_stack


def caught(raises: Callable[[], object]) -> Exception:
    try:
        raises()
    except Exception as error:  # noqa: BLE001 - as the episode does
        return error
    raise AssertionError("it did not raise")


def reads_one() -> None:
    json.loads("{")


def reads_another() -> None:
    json.loads("{")


def recurses() -> None:
    recurses_again()


def recurses_again() -> None:
    recurses()


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no words")


def is_unspeakable() -> None:
    raise Unspeakable


def test_faults_of_one_kind_are_raised_by_one_line_of_the_environment() -> None:
    one, another = describe_fault(caught(reads_one)), describe_fault(caught(reads_another))
    assert one == describe_fault(caught(reads_one))
    assert one.kind == f"JSONDecodeError at test_fault.py:{reads_one.__code__.co_firstlineno + 1}"
    assert another.kind == f"JSONDecodeError at test_fault.py:{reads_another.__code__.co_firstlineno + 1}"
    assert "decoder.py" in one.traceback  # what it called is shown


def test_a_traceback_is_bounded_and_safe_to_print() -> None:
    deep = describe_fault(caught(recurses))
    assert len(deep.traceback.splitlines()) <= 61
    assert deep.traceback.startswith("Traceback")
    assert deep.traceback.endswith("RecursionError: maximum recursion depth exceeded")

    def writes_escapes() -> None:
        raise ValueError("\x1b[2J\ud800" + "x" * 100_000)

    fault = describe_fault(caught(writes_escapes))
    assert "\x1b" not in fault.traceback
    assert len(fault.traceback.encode()) < 10_000


def test_an_exception_that_cannot_speak_is_described() -> None:
    error = caught(is_unspeakable)
    line = is_unspeakable.__code__.co_firstlineno + 1
    assert describe_error(error) == f"Unspeakable: (its __str__ raised RuntimeError) (test_fault.py:{line})"
    assert describe_fault(error).kind == f"Unspeakable at test_fault.py:{line}"


def test_a_broken_contract_needs_no_traceback() -> None:
    assert describe_fault(EnvError("step() of Desk returned the reward nan")).traceback == ""


def test_a_thread_that_has_ended_stands_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread_stack(thread) is None
