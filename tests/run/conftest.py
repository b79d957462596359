from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.runs import Runs


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(stack, monkeypatch)
