"""An environment as most people write it: a few tools, a start and an answer.

`@tool` makes a method a tool, with a JSON schema from its annotations and its docstring.
"""

import inspect
import json
import typing
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias, TypeVar

from docstring_parser import parse
from pydantic import PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from agentrl.data.plain import MAX_VALUES, PlainDataError, abbreviated, line_of, plain_data, words_of
from agentrl.env.background import BlockedLoopError, awaited, run_in_background
from agentrl.env.message_env import MessageEnv, as_message, as_number
from agentrl.errors import EnvironmentFailure
from agentrl.types import Message

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__agentrl_tool__"


def tool(function: F) -> F:
    """Offer a method of a `ToolEnv` to the agent as a tool.

    Its name, annotations and docstring (Google, NumPy or reST style) become the tool's JSON schema. Coroutine functions
    run on a shared background loop under the environment's `tool_timeout_s`.
    """
    setattr(function, _MARK, True)
    return function


def tool_call(name: str, /, **arguments: Any) -> Message:
    """Return the assistant message that calls one tool: what an oracle says."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


class ToolCallError(Exception):
    """Call that the model wrote and that cannot be made; the message is for the model."""


def arguments_object(name: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call of tool `name` as a model writes them, an object or JSON of one.

    Raises:
        ToolCallError: in words for the model.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ToolCallError(f"arguments of {name} are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolCallError(f"arguments of {name} must be a JSON object, got {type(arguments).__name__}")
    return arguments


def tool_schemas(tools: object) -> list[dict[str, Any]]:
    """Return what an environment offers as `tools`, as plain data in which every property has a schema that is a dict.

    Raises:
        PlainDataError: naming the entry that is no OpenAI-style schema.
    """
    schemas = plain_data(tools, "tools")
    if not isinstance(schemas, list):
        raise PlainDataError(f"tools is {abbreviated(tools)}; give a list of JSON schemas, OpenAI style")
    for number, schema in enumerate(schemas):
        function = schema.get("function") if isinstance(schema, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            raise PlainDataError(
                f"tools[{number}] is {abbreviated(schema)}, which is no OpenAI-style schema; give "
                "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}"
            )
        place, parameters = f"tools[{number}], {abbreviated(function['name'])}", function.get("parameters", {})
        if not isinstance(parameters, dict):
            raise PlainDataError(
                f"{place}: parameters is {abbreviated(parameters)}; give a JSON schema of type 'object'"
            )
        required = parameters.get("required", [])
        if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
            raise PlainDataError(f"{place}: required is {abbreviated(required)}; give a list of names")
        properties = parameters.get("properties", {})
        if not isinstance(properties, dict):
            raise PlainDataError(f"{place}: properties is {abbreviated(properties)}; map names to JSON schemas")
        for name, declared in properties.items():
            if isinstance(declared, bool):  # JSON schema's short form of anything, and of nothing
                properties[name] = {} if declared else {"not": {}}
            elif not isinstance(declared, dict) or not isinstance(declared.get("enum", []), list):
                raise PlainDataError(
                    f"{place}: property {abbreviated(name)} is {abbreviated(declared)}, no JSON schema"
                )
    return schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the environment's class declares it."""

    name: str
    schema: dict[str, Any]
    """JSON schema, OpenAI style: `{"type": "function", "function": {name, description, parameters}}`."""
    arguments: TypeAdapter[Any]
    """Validates keyword arguments; returns them, coerced, as a dict."""
    is_coroutine: bool
    untyped: tuple[str, ...] = ()
    """Parameters without a type hint: the schema lets the model give anything."""

    def validate(self, arguments: Any) -> dict[str, Any]:
        """Return the keyword arguments for a call.

        Raises:
            ToolCallError: in words for the model.
        """
        try:
            validated: dict[str, Any] = self.arguments.validate_python(arguments_object(self.name, arguments))
        except ValidationError as error:
            details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise ToolCallError(f"wrong arguments for {self.name}: {details}") from None
        return validated


def tool_specs(cls: type) -> dict[str, ToolSpec]:
    """Collect the tools of an environment class by name, in the order they are defined, base classes first."""
    specs = {}
    for base in reversed(cls.__mro__):
        for name, function in vars(base).items():
            if is_tool(function):
                specs[name] = _spec(name, function)
    return specs


@cache
def function_spec(function: Callable[..., Any]) -> ToolSpec:
    """Return a function that is no method as a tool."""
    return _spec(function.__name__, function, num_bound=0)


def is_tool(function: object) -> bool:
    """Return whether a function is marked with `@tool`."""
    return bool(getattr(function, _MARK, False))


def _spec(name: str, function: Callable[..., Any], *, num_bound: int = 1) -> ToolSpec:
    parameters = [p.replace(annotation=_annotation(function, p.name)) for p in _parameters(function, num_bound)]

    def arguments(**kwargs: Any) -> dict[str, Any]:
        return kwargs

    # pydantic reads the signature and the annotations of the function it is given: those of the method without `self`.
    declared: Any = arguments
    declared.__signature__ = inspect.Signature(parameters)
    declared.__annotations__ = {p.name: p.annotation for p in parameters}
    adapter: TypeAdapter[Any] = TypeAdapter(declared)
    doc = parse(inspect.getdoc(function) or "")
    schema = adapter.json_schema()
    schema.setdefault("properties", {})
    for parameter in doc.params:
        if parameter.arg_name in schema["properties"] and parameter.description:
            schema["properties"][parameter.arg_name]["description"] = parameter.description
    for entry in schema["properties"].values():
        entry.pop("title", None)
    description = " ".join(filter(None, (doc.short_description, doc.long_description)))
    return ToolSpec(
        name=name,
        schema={"type": "function", "function": {"name": name, "description": description, "parameters": schema}},
        arguments=adapter,
        is_coroutine=inspect.iscoroutinefunction(function),
        untyped=tuple(p.name for p in parameters if p.name not in inspect.get_annotations(function)),
    )


def _annotation(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a tool's parameter.

    Raises:
        TypeError: with tool, parameter and type, if no JSON schema expresses it.
    """
    given = inspect.get_annotations(function).get(name, Any)
    try:
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        hint = typing.get_type_hints(SimpleNamespace(__annotations__={name: given}), scope, include_extras=True)[name]
        TypeAdapter(hint).json_schema()
    except (PydanticUserError, PydanticUndefinedAnnotation, SchemaError, NameError, SyntaxError, TypeError) as error:
        shown = given if isinstance(given, str) else inspect.formatannotation(given)
        raise TypeError(
            f"tool {function.__qualname__}: parameter {name!r} is annotated with {shown}, which no JSON schema expresses "
            f"({line_of(error)[:200]}); annotate it with int, str, list[str], Literal, a pydantic model or the like"
        ) from error
    return hint


def _parameters(function: Callable[..., Any], num_bound: int) -> list[inspect.Parameter]:
    """List the parameters after those that are bound (`self`), all as keywords: that is how a model gives them."""
    parameters = list(inspect.signature(function).parameters.values())[num_bound:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {function.__qualname__}: parameter {parameter} has no name a model could give")
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]


Said: TypeAlias = str | Sequence[Message] | None
"""A user's text, or messages."""


class ToolEnv(MessageEnv):
    """Tools are methods marked with `@tool`; `start` opens the dialogue and `answer` replies to plain text.

    Whatever call the model writes, it gets an answer: an unknown tool, malformed JSON, wrong arguments, an exception in
    the tool or a coroutine tool's timeout becomes a tool message that begins with `Error:`, and a count in
    `info["tool_errors"]`. What `answer` raises leaves `step`, and so does a reward that is no number: it is a fault of the
    environment, and fails the episode. So does a tool that is no coroutine and hangs: nothing in here can stop it, and the
    episode's deadline (`rollout.env_timeout_s`) does.

    `start`, `answer`, `oracle` and tools may be coroutines (`async def`): they run on one event loop of the process.
    """

    tool_timeout_s: ClassVar[float] = 10.0
    """Deadline of one call of a coroutine tool, in seconds."""
    max_tool_chars: ClassVar[int] = 4_000
    """Longest text a tool message may carry; what is cut is said in its last line."""
    max_error_chars: ClassVar[int] = 300
    """Longest error message, before the note that says what was cut."""
    _specs: ClassVar[dict[str, ToolSpec]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the class's tools, so that a mistake in a signature shows when the class is defined."""
        super().__init_subclass__(**kwargs)
        if "tools" in vars(cls):
            raise TypeError(
                f"{cls.__name__}.tools: the tools of a ToolEnv are its methods marked with @tool; "
                "set self.tools in __init__() to offer fewer of them"
            )
        cls._specs = tool_specs(cls)
        cls.tools = [spec.schema for spec in cls._specs.values()]

    def __init__(self) -> None:
        super().__init__()
        self._components: dict[str, float] = {}
        self._info: dict[str, Any] = {}
        self._is_over: bool | None = None  # None: never reset
        self._is_unscored = False

    @abstractmethod
    def start(self, options: dict[str, Any]) -> Said | Awaitable[Said]:
        """Set up the task that `options` names (see `MessageEnv`) from `self.np_random`; return the first text, or messages.

        The same object may play another task after it: set everything here, and hold shared data at module level.
        """
        raise NotImplementedError(f"{type(self).__name__} must define start(options)")

    @abstractmethod
    def answer(self, text: str) -> Said | Awaitable[Said]:
        """Reply to a turn without a tool call; None says nothing (for use with `finish`)."""
        raise NotImplementedError(f"{type(self).__name__} must define answer(text)")

    def reward(self, amount: float | None, part: str = "reward") -> None:
        """Add to this turn's reward; `part` names the share in `info["reward_components"]`.

        None: nothing can score it. If the last turn gets no other reward, the episode leaves training and evaluation.

        Raises:
            EnvironmentFailure: for what is no finite number. It fails the episode, in a tool too: the model did nothing wrong.
        """
        if amount is None:
            self._is_unscored = True
            return
        if (number := as_number(amount)) is None:
            raise EnvironmentFailure(f"reward() takes a finite number, or None, got {abbreviated(amount)}")
        self._components[part] = self._components.get(part, 0.0) + number

    def finish(self, *, success: bool | None = None, score: float | None = None) -> None:
        """End the task with this turn.

        Args:
            success: whether the task was solved; what evaluation counts.
            score: how well, from 0 to 1, if there is a between; by default 1 for success and 0 for none.

        Raises:
            EnvironmentFailure: for what is no finite number. It fails the episode, in a tool too.
        """
        given = {"success": success, "score": success if score is None else score}
        numbers = {name: as_number(value) for name, value in given.items() if value is not None}
        if wrong := [name for name, number in numbers.items() if number is None]:
            raise EnvironmentFailure(
                f"finish({wrong[0]}=...) takes a number or a truth value, got {abbreviated(given[wrong[0]])}"
            )
        self._is_over = True
        self._info |= numbers | ({"success": bool(numbers["success"])} if "success" in numbers else {})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Begin a task; the same seed begins the same one."""
        super().reset(seed=seed)
        self._components = {}
        self._info = {}
        self._is_over = False
        self.take_logged()
        return self._messages_of(self.start(dict(options or {})), "start()"), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], Any, bool, bool, dict[str, Any]]:
        """Carry out an assistant message: its tool calls in order, or `answer` if there are none."""
        if self._is_over is not False:
            raise RuntimeError("step() needs a running task: call reset() first, and again after the task has ended")
        self._components, self._info = {}, {"tool_errors": 0}
        self._is_unscored = False
        message = as_message(action)
        replies: list[Message] = []
        if calls := message.get("tool_calls"):
            for call in calls:
                replies.append(self._call(call))
                if self._is_over:
                    break
        else:
            replies.extend(self._messages_of(self.answer(str(message.get("content") or "")), "answer()"))
        info = {**self._info, "reward_components": dict(self._components)}
        if logged := self.take_logged():
            info["logged"] = logged
        reward = None if self._is_unscored and not self._components else sum(self._components.values(), 0.0)
        return tuple(replies), reward, bool(self._is_over), False, info

    def run_tool(self, name: str, arguments: Any) -> str:
        """Carry out one call and return the tool message's text; override it to offer tools that are no methods.

        Args:
            name: of the tool, as the model wrote it; "" for a call that has none.
            arguments: as the model wrote them: a dict, JSON, or anything else.

        Raises:
            ToolCallError: in words for the model. Whatever else is raised becomes an error message too,
                but for an EnvironmentFailure, which fails the episode.
        """
        if not name:
            raise ToolCallError(f"malformed tool call: {arguments}")
        offered = [schema["function"]["name"] for schema in self.tools]
        if name not in offered or name not in self._specs:
            raise ToolCallError(f"unknown tool {name!r}; the tools are {', '.join(offered)}")
        return self.call_tool(self._specs[name], getattr(self, name), arguments)

    def call_tool(self, spec: ToolSpec, function: Callable[..., Any], arguments: Any) -> str:
        """Call the function of a tool, with its deadline where it is a coroutine function; return what it says."""
        result = function(**spec.validate(arguments))
        if spec.is_coroutine:
            try:
                result = run_in_background(result, timeout_s=self.tool_timeout_s)
            except TimeoutError as error:
                why = f": {error}" if isinstance(error, BlockedLoopError) else ""
                raise ToolCallError(f"{spec.name} timed out{why}") from None
        return "" if result is None else str(result)

    def _messages_of(self, returned: Any, method: str) -> tuple[Message, ...]:
        said = awaited(returned, f"{method} of {type(self).__name__}", timeout_s=self.coroutine_timeout_s)
        if said is not None and not isinstance(said, Iterable):
            raise EnvironmentFailure(
                f"{method} returned {abbreviated(said)}; return a text, a list of messages, or None"
            )
        return _messages(said)

    def _call(self, call: Any) -> Message:
        call = call if isinstance(call, dict) else {"function": {"arguments": call}}
        function = call.get("function")
        function = function if isinstance(function, dict) else {"arguments": function}
        name = str(function.get("name") or "")
        try:
            content = _bounded(self.run_tool(name, function.get("arguments", {})), self.max_tool_chars)
        except EnvironmentFailure:
            raise
        except Exception as error:  # noqa: BLE001 - the tool boundary: what a call raises is an answer to the model
            self._info["tool_errors"] += 1
            words = str(error) if isinstance(error, ToolCallError) else words_of(error)
            content = _bounded(f"Error: {words}", self.max_error_chars)
        reply = {"role": "tool", "name": name, "content": content}
        return reply | ({"tool_call_id": call["id"]} if "id" in call else {})


def _messages(said: Any) -> tuple[Message, ...]:
    if said is None:
        return ()
    if isinstance(said, str):
        return ({"role": "user", "content": said},)
    return tuple(islice(said, MAX_VALUES))  # what has no end is refused by its size


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} characters cut]"
