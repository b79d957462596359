"""Sources in another process, or on disk: a moment is copied by making its actions again."""

from abc import abstractmethod
from typing import Any

from agentrl import ToolEnv


class ReplayedEnv(ToolEnv):
    """A `ToolEnv` whose state is its source's, and follows from the task and the actions.

    What is copied or pickled is the environment without its source. The copy's source begins the same task and takes the same
    actions when it is first needed. So a source that draws at random, or reads a clock, has forks that go elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Any] = []
        self._is_live = False

    @abstractmethod
    def begin_source(self) -> Any:
        """Let the source begin the task that `start` chose, and return what it says."""

    @abstractmethod
    def step_source(self, action: Any) -> Any:
        """Let the source take an action, and return what it says."""

    def begin(self) -> Any:
        """Begin the task; for use in `start`."""
        self.actions = []
        said = self.begin_source()
        self._is_live = True
        return said

    def act(self, action: Any) -> Any:
        """Take an action; for use in `answer` and tools. One that raises is not taken."""
        if not self._is_live:
            self.begin_source()
            for earlier in self.actions:
                self.step_source(earlier)
            self._is_live = True
        said = self.step_source(action)
        self.actions.append(action)
        return said

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_is_live": False, "source": None}
