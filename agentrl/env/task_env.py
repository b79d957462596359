"""Tasks as data: an environment over a table of them, without a class to write."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pydantic import Field, PydanticSchemaGenerationError, ValidationError

from agentrl.data.plain import abbreviated, line_of
from agentrl.env.message_env import as_message
from agentrl.env.rewards.functions import Answered, grade, load_rewards
from agentrl.env.task_table import TableOptions, load_table
from agentrl.env.tool_env import ToolEnv, function_spec, is_tool
from agentrl.errors import EnvironmentFailure, UserError
from agentrl.recipe.plugin import explain
from agentrl.recipe.registry import import_attribute
from agentrl.types import Message, Need


class TaskOptions(TableOptions):
    """Options of an environment over a table of tasks."""

    system: str | None = None
    """System message before each prompt."""
    rewards: list[Any] = Field(default=[])
    """Reward functions, each the name of an installed one, `module:function`, or a function; or a mapping with one of
    these as `reward`, a `weight`, a `name` and options of the function. The first one decides about success."""
    success_at: float = 1.0
    """Value of the first reward from which on an episode is a success."""
    reward_timeout_s: float = Field(default=55.0, gt=0)
    """Deadline of all rewards that are coroutines, in seconds. Keep `rollout.env_timeout_s` above it."""
    tools: list[str | Callable[..., Any]] = Field(default=[])
    """Functions that the policy may call as tools, beside the tools of a subclass; named `module:function`, they must be marked
    with `@agentrl.tool`."""
    max_answers: int = Field(default=1, gt=0)
    """Answers without a tool call until the episode ends. Before the last one, an answer that is no success gets `retry`."""
    retry: str = "That is not right. Try again."
    """Message after an answer that is no success."""


class TaskEnv(ToolEnv):
    """A table of tasks: each is a prompt, and rewards grade the answer.

    `{id: tasks, options: {tasks: my.jsonl, prompt: question, answer: answer, rewards: [exact_match]}}` needs no class. A
    subclass may add tools, whose methods find the row in `self.task`, pay rewards of its own, and override `opening`. Rewards
    are paid with the last answer; one that raises fails the episode. One that returns None is left out; where all that pay do,
    the episode leaves training and evaluation.
    """

    turn_rewards = False
    options_model = TaskOptions
    """Model of `**options`: `agentrl fields` lists them."""

    def __init__(self, **options: Any) -> None:
        """Read the table, or share the one that was read.

        Args:
            options: the fields of `TaskOptions`.

        Raises:
            UserError: for an option that is unknown or impossible, and for a table that cannot be played.
        """
        super().__init__()
        try:
            self.options = TaskOptions.model_validate(options)
        except ValidationError as error:
            raise UserError("; ".join(explain(error, TaskOptions))) from error
        self._table = load_table(self.options)
        has_answer = self.options.answer is not None
        self._rewards = load_rewards(self.options.rewards, columns=self._table.columns, has_answer=has_answer)
        if type(self) is TaskEnv and not self._rewards:
            raise UserError("rewards: there is none, so nothing is learned; name one, such as exact_match")
        if self.options.system is not None and self._brings_system_messages():
            raise UserError("system: the prompts of the table begin with system messages of their own; remove it")
        self._functions = self._function_tools()
        self.tools = [*self.tools, *(function_spec(function).schema for function in self._functions.values())]
        self._split = "train"
        self.task: dict[str, Any] = {}
        """The row that is played: a copy, by column."""
        self.task_index = 0
        """Its number within the split."""
        self.num_answers = 0
        self._said: list[Message] = []
        self._graded: dict[str, Any] = {}
        """Scores of the answers to this task."""

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        return len(self._table.splits[split])

    def tasks_hash(self, split: str) -> str:
        """Return a hash of the tasks of a split, in their order: a run is resumed on the tasks with which it began."""
        return self._table.hashes[split]

    def start(self, options: dict[str, Any]) -> str | Sequence[Message]:
        """Choose the task that `options["task_index"]` names, or one that the seed draws, and return its `opening`."""
        self._split = options.get("split", "train")
        rows, index = self._table.splits[self._split], options.get("task_index")
        if not rows:
            raise EnvironmentFailure(f"the table has no task of the split {self._split!r} (eval_share: 0)")
        if index is None:
            index = int(self.np_random.integers(len(rows)))
        elif not 0 <= index < len(rows):
            raise EnvironmentFailure(f"the table has no longer a task {index}: its {self._split} split has {len(rows)}")
        self.task_index, self.task = index, copy.deepcopy(rows[index])
        self.num_answers = 0
        self._said = []
        self._graded = {}
        return self.opening()

    def opening(self) -> str | Sequence[Message]:
        """Return the first messages of the task that was chosen; override it to make them of its other columns."""
        if self.options.prompt is None:
            raise EnvironmentFailure("prompt: name the column of the prompt, or override opening()")
        prompt = self.task[self.options.prompt]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else copy.deepcopy(prompt)
        if self.options.system is not None:
            messages = [{"role": "system", "content": self.options.system}, *messages]
        return messages

    def answer(self, text: str) -> str | None:
        """Grade an answer; the last one is paid, and ends the task."""
        self.num_answers += 1
        graded = grade(self._rewards, self._answered(text), timeout_s=self.options.reward_timeout_s)
        first = graded.get(self._rewards[0].name) if self._rewards else None
        is_success = first is not None and first >= self.options.success_at
        is_undecided = bool(self._rewards) and first is None
        if not (is_success or is_undecided) and self.num_answers < self.options.max_answers:
            return self.options.retry
        paying = [reward.name for reward in self._rewards if reward.weight]
        if paying and graded.keys().isdisjoint(paying):
            self.reward(None)
        else:
            for reward in self._rewards:
                if reward.name in graded:
                    self.reward(reward.weight * graded[reward.name], reward.name)
        self._info |= self._graded
        if first is not None:
            self.finish(success=is_success, score=min(1.0, max(0.0, first)))
        else:
            self.finish()
            self._info |= {"success": None, "score": None} if is_undecided else {}
        return None

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], Any, bool, bool, dict[str, Any]]:
        """Carry out an assistant message, and remember the dialogue for the rewards."""
        self._said.append(copy.deepcopy(as_message(action)))
        result = super().step(action)
        self._said.extend(copy.deepcopy(result[0]))
        return result

    def gold_answer(self) -> str | None:
        """Return the right answer of the row, if there is a column of them."""
        column = self.options.answer
        return None if column is None or not self.task else _spoken(self.task[column])

    def provides(self) -> frozenset[Need]:
        """Return what credit schemes may read."""
        has_none = type(self).gold_answer is TaskEnv.gold_answer and self.options.answer is None
        return super().provides() - ({Need.ANSWER_LOGPROBS} if has_none else set())

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Answer as the table does; a wrong turn answers as it does to another task of the split."""
        columns = [column for column in (self.options.demonstration, self.options.answer) if column is not None]
        if not columns:
            raise NotImplementedError(
                "the table has no column of answers: set answer or demonstration, or train without warm-up (warmup.steps: 0)"
            )
        row, rows = self.task, self._table.splits[self._split]
        if rng is not None and rng.random() >= skill:
            row = rows[int(rng.integers(len(rows)))]
        known = [row[column] for column in columns if row[column] not in (None, "")]
        if not known:
            raise NotImplementedError("this held-out task has no demonstration")
        return {"role": "assistant", "content": _spoken(known[0])}

    def run_tool(self, name: str, arguments: Any) -> str:
        """Carry out one call, of a function of the option `tools` or of a method."""
        if name in self._functions:
            function = self._functions[name]
            return self.call_tool(function_spec(function), function, arguments)
        return super().run_tool(name, arguments)

    def _function_tools(self) -> dict[str, Callable[..., Any]]:
        found: dict[str, Callable[..., Any]] = {}
        for number, given in enumerate(self.options.tools):
            field = f"tools[{number}]"
            function = import_attribute(given, field=field, kind="function") if isinstance(given, str) else given
            if isinstance(given, str) and not is_tool(function):  # a recipe may come from someone else
                raise UserError(f"{field}: {given!r} is not marked with @agentrl.tool, and is not offered to a model")
            if not inspect.isroutine(function) or not inspect.getdoc(function):
                raise UserError(
                    f"{field}: {abbreviated(function)} has no docstring, from which the model learns what it does"
                )
            try:
                spec = function_spec(function)
            except (
                TypeError,
                NameError,
                PydanticSchemaGenerationError,
            ) as error:  # of parameters that no model could give
                raise UserError(f"{field}: {line_of(error)}") from error
            if spec.name in found or spec.name in self._specs:
                raise UserError(f"{field}: there are two tools called {spec.name!r}; rename one")
            found[spec.name] = function
        return found

    def _brings_system_messages(self) -> bool:
        prompts = [row.get(self.options.prompt or "") for rows in self._table.splits.values() for row in rows]
        return any(isinstance(prompt, list) and prompt[0]["role"] == "system" for prompt in prompts)

    def _answered(self, text: str) -> Answered:
        prompt = None if self.options.prompt is None else self.task[self.options.prompt]
        answer = None if self.options.answer is None else self.task[self.options.answer]
        return Answered(
            prompt=prompt, completion=text, messages=self._said, answer=answer, task=self.task, info=self._graded
        )


def _spoken(answer: Any) -> str:
    """Return a right answer as text; of several, the first."""
    is_several = isinstance(answer, list) and answer and all(isinstance(each, str | int | float) for each in answer)
    return str(answer[0] if is_several else answer)
