"""The recipe's section about a program that plays in place of an environment."""

import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.agent.clients import Client, Command, Function, Service
from agentrl.agent.worker import Workers
from agentrl.data.files import absolute
from agentrl.endpoint.tree import Thoughts
from agentrl.env import EnvDescription
from agentrl.env.rewards.functions import Reward, load_rewards
from agentrl.env.task_table import TableOptions, TaskTable, load_table
from agentrl.errors import ConfigError, UserError
from agentrl.recipe.plugin import MayChange
from agentrl.recipe.registry import import_attribute
from agentrl.types import Need, NumTasks, Seconds, TaskHashes

KINDS = ("run", "command", "url")
"""Fields of which one names the program."""


class AgentConfig(BaseModel):
    """A program that plays the tasks of a table, and asks the policy for its answers as it would ask any model's API."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str | None = None
    """Function `module:function`, called with the row of the task, as a dict, and a session, which has `base_url` and `api_key`
    for its client. It returns a reward, None if nothing can be said, or a mapping with `reward`, `success` and other
    numbers. One with `async def` shares an event loop with others; any other has a thread of its own."""
    processes: Annotated[int, MayChange()] = Field(default=0, ge=0)
    """`run`: number of other processes in which the function plays, so that neither a crash nor code that blocks stops the
    trainer. 0: it plays in this one."""
    command: tuple[str, ...] | None = None
    """Program and its arguments in place of a function, run in a folder of its own. `{prompt}` and `{COLUMN}` stand for texts
    of the task; `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and `AGENTRL_TASK` are set."""
    url: str | None = None
    """Service in place of a function: `{"task", "base_url", "api_key", "anthropic_url"}` is posted to it, and it answers with
    what a function returns."""
    tasks: TableOptions
    """Table of the tasks: a file, or the options of a `tasks` environment. Its `prompt` is None unless it is named."""
    reward: tuple[Any, ...] = ()
    """Reward functions for the policy's last answer, as in a `tasks` environment. Empty: what the program says counts."""
    check: tuple[str, ...] = ()
    """`command`: another command, run in its folder afterwards. Exit status 0 is reward 1 and success, any other 0."""
    files: Path | None = None
    """`command`: folder whose content each run finds in its own."""
    variables: dict[str, str] = {}
    """`command`: further environment variables."""
    timeout_s: Annotated[Seconds, MayChange()] = 600.0
    """Longest silence of the program, in seconds: no call is under way, and it does not end. Updates do not count."""
    on_error: Literal["result", "fault"] = "result"
    """Consequence of a program that fails. `result`: it is run again on the same answers; the same failure is a result, with
    reward 0 beside what was paid before (`stop/agent_error`), and another one is a fault. `fault`: each is, and the episode
    is played again."""
    thoughts: Thoughts = "unsaid"
    """Meaning of a thought that a client leaves out of the history. `unsaid`: it was not taken back, since most cannot send it.
    `as_sent`: it was."""
    roles: tuple[str, ...] = ()
    """Names of models that clients may ask for to say which agent speaks; it is recorded with each turn."""
    provides: tuple[Literal["turn_rewards", "state_keys"], ...] = ()
    """Data that the program reports beside its end, which credit schemes may read: `turn_rewards` (`session.reward`),
    `state_keys` (`session.state`)."""
    heartbeat_s: Annotated[Seconds, MayChange()] = 10.0
    """Seconds of waiting after which a client gets a sign of life. Below the read timeout of the client."""
    host: Annotated[str, MayChange()] = "127.0.0.1"
    """Address at which the endpoint listens. Only another one can be reached from elsewhere: see SECURITY.md."""
    port: Annotated[int, MayChange()] = Field(default=0, ge=0, lt=2**16)
    """Port of the endpoint; of several ranks each takes the next one. 0: a free one."""
    public_host: Annotated[str | None, MayChange()] = None
    """Name by which clients reach the host. None: the host."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _as_table(cls, given: object) -> object:
        given = {"tasks": given} if isinstance(given, str | Path | list) else given
        if not isinstance(given, Mapping):
            return given
        # A run's own recipe holds every field: one that was left open must not contradict another.
        fields = TableOptions.model_fields
        return {"prompt": None} | {
            name: value
            for name, value in given.items()
            if name not in fields or fields[name].is_required() or name == "prompt" or value != fields[name].default
        }

    @field_validator("reward", mode="before")
    @classmethod
    def _as_list(cls, given: object) -> object:
        return (given,) if isinstance(given, str | Mapping) else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"name one of run, command and url, got {' and '.join(given) or 'none'}")
        if self.command is None and (lost := [name for name in ("check", "files", "variables") if getattr(self, name)]):
            raise ValueError(f"{lost[0]}: belongs to a command; remove it")
        if self.run is None and self.processes:
            raise ValueError("processes: belongs to run; remove it")
        if self.command is not None:
            if not self.command:
                raise ValueError("command: it is empty; name a program")
            if shutil.which(self.command[0]) is None and "/" not in self.command[0]:
                raise ConfigError(f"agent.command: there is no program {self.command[0]!r} on the path; install it")
        if self.files is not None and not absolute(self.files).is_dir():
            raise ConfigError(f"agent.files: there is no folder {self.files}")
        if self.check and self.reward:
            raise ValueError("check: it pays, and so does reward; remove one")
        if self.host in ("0.0.0.0", "::") and self.public_host is None:
            raise ValueError(
                f"host: {self.host} is no address that a client can call; set public_host to the name of this machine"
            )
        return self

    @property
    def name(self) -> str:
        """Name of the program."""
        return self.run or self.url or (self.command or ("",))[0]

    @cached_property
    def table(self) -> TaskTable:
        """Table of the tasks.

        Raises:
            UserError: for one that cannot be played.
        """
        try:
            return load_table(self.tasks)
        except UserError as error:
            raise type(error)(f"agent.tasks: {error}") from error

    def rewards(self) -> tuple[Reward, ...]:
        """Return the reward functions.

        Raises:
            UserError: for what names none.
        """
        columns = self.table.columns
        try:
            return load_rewards(self.reward, columns=columns, has_answer=self.tasks.answer is not None)
        except UserError as error:
            raise type(error)(f"agent.{error}") from error

    def client(self) -> Client:
        """Return what plays a task.

        Raises:
            ConfigError: for a function that is none.
        """
        if self.run is not None:
            function = import_attribute(self.run, field="agent.run", kind="function")
            if not callable(function):
                raise ConfigError(f"agent.run: {self.run!r} is no function")
            return Workers(self.run, num=self.processes) if self.processes else Function(function)
        if self.url is not None:
            return Service(url=self.url, timeout_s=24 * 3600.0)
        return Command(
            argv=self.command or (),
            variables=self.variables,
            files=self.files and absolute(self.files),
            prompt=self.tasks.prompt,
            check=self.check,
        )

    def describe(self) -> EnvDescription:
        """Return what the program offers to credit schemes, and its tasks.

        Raises:
            UserError: for a table that cannot be played.
        """
        splits, hashes = self.table.splits, self.table.hashes
        answers = {Need.ANSWER_LOGPROBS} if self.tasks.answer is not None else set[Need]()
        return EnvDescription(
            needs=frozenset(map(Need, self.provides)) | answers,
            tools=[],
            num_tasks=NumTasks(train=len(splits["train"]), eval=len(splits["eval"])),
            task_hashes=TaskHashes(train=hashes["train"], eval=hashes["eval"]),
        )
