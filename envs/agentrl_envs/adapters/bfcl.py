"""Tasks of the Berkeley Function-Calling Leaderboard (BFCL), scored by its own checkers."""

import ast
import copy
import decimal
import hashlib
import importlib.util
import inspect
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from agentrl import EnvironmentFailure, Message, ToolEnv, UserError, tool_call
from agentrl.env import ToolCallError, arguments_object
from agentrl.env.message_env import as_message
from agentrl_envs.options import in_split, whole_number

try:
    import mpmath
    from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC as MORE_FUNCTIONS
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.constants.executable_backend_config import (
        CLASS_FILE_PATH_MAPPING,
        MULTI_TURN_FUNC_DOC_FILE_MAPPING,
        STATELESS_CLASSES,
    )
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker
except ModuleNotFoundError as error:
    # Its pins (numpy 1.26 among them) clash with ours, and what needs them is not used: no extra can name it.
    raise UserError(f"BFCL is not installed ({error}); pip install --no-deps bfcl-eval mpmath") from error

_MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
_SINGLE_TURN = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
_LIVE = (
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
CATEGORIES = {
    "multi_turn": _MULTI_TURN,
    "single_turn": _SINGLE_TURN,
    "live": _LIVE,
    **{name: (name,) for name in (*_MULTI_TURN, *_SINGLE_TURN, *_LIVE)},
}
"""BFCL's categories by the names that the option `category` takes."""
_SYSTEM = (
    "Do what the user asks with the tools you have. Call them until a request is done, then answer in text: a message without "
    "a call ends your turn, and the user goes on. If no tool does what is asked, or a value is missing, say so and call none."
)
_SYSTEM_SINGLE = (
    "Make all the tool calls that the request needs in one message. If no tool does it, say so and call none."
)
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_KEYWORDS = ("type", "description", "enum", "default", "properties", "required", "items")
_DATA = Path(inspect.getfile(Language)).parents[1] / "data"
_lock = threading.Lock()
"""Held during a call: some APIs keep precision and answers in globals of the process."""


def _begin_again() -> None:
    """Let go of the lock: in a forked process nobody would."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a function."""

    name: str
    arguments: dict[str, Any]


_NO_CALL = Call(name="", arguments={})


def _written(name: str, arguments: Any) -> Call:
    """Return a call as a model writes it.

    Raises:
        ToolCallError: in words for the model.
    """
    if not name:
        raise ToolCallError(f"malformed tool call: {arguments}")
    return Call(name=name, arguments=arguments_object(name, arguments))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A task as BFCL publishes it."""

    category: str
    row: dict[str, Any]
    """Its questions by turn, the functions or the APIs, and the state in which these begin."""
    answer: list[Any]
    """The ground truth: calls by turn, or the accepted arguments of each call. Empty: there is none."""

    @property
    def id(self) -> str:
        """Its id, such as `multi_turn_base_3`."""
        return str(self.row["id"])

    @property
    def is_multi_turn(self) -> bool:
        """Whether a user goes on after the first request."""
        return self.category in _MULTI_TURN


@cache
def load_tasks(category: str) -> tuple[Task, ...]:
    """Return the tasks of one of BFCL's categories.

    Raises:
        UserError: if the installed version does not have it.
    """
    file, answers = _DATA / f"BFCL_v4_{category}.json", _DATA / f"possible_answer/BFCL_v4_{category}.json"
    if not file.is_file():
        raise UserError(
            f"category: the installed bfcl-eval has no {file.name}; pip install --no-deps bfcl-eval==2026.3.23"
        )
    truths = {row["id"]: row["ground_truth"] for row in _rows(answers)} if answers.is_file() else {}
    return tuple(Task(category=category, row=row, answer=truths.get(row["id"], [])) for row in _rows(file))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


@cache
def _documents(api: str) -> list[dict[str, Any]]:
    """Return the documents of an API's functions."""
    return _rows(_DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[api])


@cache
def split_tasks(category: str, split: str) -> tuple[Task, ...]:
    """Return the tasks of a split. The harder variants of a task belong to the same one."""
    tasks = [task for name in CATEGORIES[category] for task in load_tasks(name)]
    keys = [task.id.rpartition("_")[2] if task.is_multi_turn else json.dumps(task.row["question"]) for task in tasks]
    return tuple(task for task, key in zip(tasks, keys, strict=True) if in_split(key, split))


def _functions(task: Task) -> tuple[list[dict[str, Any]], dict[int, list[dict[str, Any]]]]:
    """Return the documents of the functions that are offered at first, and of those that come with a later turn."""
    if not task.is_multi_turn:
        return task.row["function"], {}
    documents = [document for api in task.row["involved_classes"] for document in _documents(api)]
    missed = {int(turn): set(names) for turn, names in task.row.get("missed_function", {}).items()}
    held_out = set().union(*missed.values())
    later = {turn: [each for each in documents if each["name"] in names] for turn, names in missed.items()}
    return [each for each in documents if each["name"] not in held_out], later


def _tool(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's schema, OpenAI style, whose names have no dots."""
    function = {
        "name": _plain_name(document["name"]),
        "description": document["description"],
        "parameters": _json_schema(document["parameters"]),
    }
    return {"type": "function", "function": function}


def _plain_name(name: str) -> str:
    return name.replace(".", "_")


def _json_schema(node: Mapping[str, Any]) -> dict[str, Any]:
    schema = {key: node[key] for key in _KEYWORDS if key in node}
    schema["type"] = _JSON_TYPES.get(node.get("type", "any"), node.get("type"))
    if "properties" in schema:
        schema["properties"] = {name: _json_schema(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = _json_schema(schema["items"])
    return schema


def make_apis(task: Task) -> dict[str, Any]:
    """Return the task's APIs in the state in which they begin."""
    apis = {}
    for name in task.row["involved_classes"]:
        api = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in STATELESS_CLASSES:
            config = copy.deepcopy(task.row["initial_config"].get(name, {}))
            api._load_scenario(config, long_context=task.category == "multi_turn_long_context")
        # In long contexts some hold objects of their module, which a booking would change for all episodes.
        apis[name] = copy.deepcopy(api)
    return apis


def respond(apis: Mapping[str, Any], call: Call) -> str:
    """Carry out a call; return its result in BFCL's words.

    Raises:
        ToolCallError: for a function that there is none of, and for whatever the function raises.
    """
    method = _methods(apis).get(call.name)
    if method is None:
        raise ToolCallError(f"name {call.name!r} is not defined")
    _refuse_endless(call.arguments)
    with _lock, decimal.localcontext(), mpmath.workdps(mpmath.mp.dps):
        try:
            result = method(**copy.deepcopy(call.arguments))  # APIs keep lists that they are given, and add to them
            return _text(result) if isinstance(result, dict) else str(result)
        except Exception as error:  # of an API, which may raise anything: it is an answer to the model
            raise ToolCallError(str(error)) from error


def _methods(apis: Mapping[str, Any]) -> dict[str, Any]:
    members = [member for api in apis.values() for member in inspect.getmembers(api, inspect.ismethod)]
    return {name: method for name, method in members if not name.startswith("_")}


def _text(result: dict[str, Any]) -> str:
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)


_MAX_BITS = 10_000
"""Longest whole number: Python prints none of more than 4,300 digits, which is 14,284 bits."""
_MAX_DIGITS = 10_000
"""Highest precision of a logarithm or a square root."""


def _refuse_endless(arguments: Mapping[str, Any]) -> None:
    """Refuse what would keep a calculator, and with it the process, for hours.

    Raises:
        ToolCallError: in words for the model.
    """
    whole = {name: value for name, value in arguments.items() if isinstance(value, int)}
    base, exponent = whole.get("base", 0), whole.get("exponent", 0)
    is_endless = any(value.bit_length() > _MAX_BITS for value in whole.values())
    is_endless |= abs(base) > 1 and exponent * base.bit_length() > 2 * _MAX_BITS
    if is_endless or any(_size(arguments.get(name)) > _MAX_DIGITS for name in ("precision", "decimal_places")):
        raise ToolCallError("the numbers are too large")


def _size(value: Any) -> int:
    try:
        return abs(int(value))
    except (TypeError, ValueError, OverflowError):
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Ground truth of a turn, carried out."""

    calls: tuple[Call, ...]
    responses: list[str]
    apis: dict[str, Any]
    """The APIs after the turn; only compared, never called."""


@cache
def expected_turns(task: Task) -> tuple[Expected, ...]:
    """Return the ground truth of each turn, carried out in order."""
    apis, turns = make_apis(task), []
    for texts in task.answer:
        calls = tuple(_parsed(text, apis) for text in texts)
        responses = [respond(apis, call) for call in calls]
        turns.append(Expected(calls=calls, responses=responses, apis=copy.deepcopy(apis)))
    return tuple(turns)


def _parsed(text: str, apis: Mapping[str, Any]) -> Call:
    """Return a call that is written in Python."""
    written = ast.parse(text.strip(), mode="eval").body
    assert isinstance(written, ast.Call)
    name = ast.unparse(written.func)
    values = [ast.literal_eval(each) for each in written.args]
    named = {str(each.arg): ast.literal_eval(each.value) for each in written.keywords}
    return Call(name=name, arguments=inspect.signature(_methods(apis)[name]).bind(*values, **named).arguments)


@cache
def _ast_checker() -> Any:
    """Return BFCL's checker of single turns, without the clients of every model that it imports beside it."""
    config = "bfcl_eval.constants.model_config"
    stub = ModuleType(config)
    stub.MODEL_CONFIG_MAPPING = {"agentrl": SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    spec = importlib.util.find_spec("bfcl_eval.eval_checker.ast_eval.ast_checker")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _lock:
        installed = sys.modules.get(config)
        sys.modules[config] = stub
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[config]
            if installed is not None:
                sys.modules[config] = installed
    return module.ast_checker


def check_calls(task: Task, calls: Sequence[Call]) -> str | None:
    """Return the kind of error in the calls of a single turn; None: they are right."""
    if task.category.endswith("irrelevance"):
        return "irrelevance_error" if calls else None
    if task.category == "live_relevance":  # any call will do
        return None if any(call.name for call in calls) else "relevance_error"
    decoded = [{call.name: call.arguments} for call in calls]
    try:
        found = _ast_checker()(task.row["function"], decoded, task.answer, Language.PYTHON, task.category, "agentrl")
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
    ):  # of values that it does not foresee, which are never right
        return "ast_checker:raised"
    return None if found["valid"] else str(found["error_type"])


class BFCL(ToolEnv):
    """A user's requests in turns, and APIs with a state; or one request, whose calls are compared with the accepted ones.

    A message without a call ends the user's turn. The turn is right if BFCL's checker finds the state of all APIs, and the
    responses so far, as the ground truth leaves them; a turn without ground truth (a function or a value is missing) is not
    checked, but what is called there counts in later ones. The first wrong turn ends the episode: BFCL's verdict is given.
    As in BFCL, a function that is held out until a later turn, and arguments of a wrong type, reach the API all the same.

    Each right turn earns its share of 1. Success means BFCL's verdict; the score is the share of right turns.
    `info["bfcl_error"]` is the kind of error that the checker found.
    """

    max_tool_chars = 40_000

    def __init__(
        self, *, category: str = "multi_turn", turn_rewards: bool = True, max_steps: int = 20, system: bool = True
    ) -> None:
        """Choose the tasks.

        Args:
            category: BFCL's name of one, such as `multi_turn_base` or `simple_python`; or `multi_turn` (base, miss_func,
                miss_param and long_context), `single_turn`, `live`.
            turn_rewards: False pays 1 for success, at the end.
            max_steps: messages with calls in a user's turn; one more fails the task.
            system: begin with a system message that says how to go about it.

        Raises:
            UserError: for a category that there is none of.
        """
        super().__init__()
        if category not in CATEGORIES:
            raise UserError(f"category: BFCL has no {category!r}; give one of {', '.join(CATEGORIES)}")
        self.category = category
        self.turn_rewards = turn_rewards
        self.max_steps = whole_number("max_steps", max_steps, at_least=1)
        self.system = system
        self._place = "train", 0
        self._begin()

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has: a quarter, by hash, is for evaluation."""
        return len(split_tasks(self.category, split))

    def tasks_hash(self, split: str) -> str:
        """Return a hash of the tasks of a split, in their order."""
        rows = [[task.row, task.answer] for task in split_tasks(self.category, split)]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @property
    def task(self) -> Task:
        """The task that is played."""
        split, index = self._place
        return split_tasks(self.category, split)[index]

    def start(self, options: dict[str, Any]) -> list[Message]:
        """Begin the task that `options["task_index"]` names, or one that the seed draws."""
        split, index = str(options.get("split", "train")), options.get("task_index")
        num = self.num_tasks(split)
        index = int(self.np_random.integers(num)) if index is None else index
        if not 0 <= index < num:
            raise EnvironmentFailure(f"BFCL has no task {index} in {self.category}: its {split} split has {num}")
        self._place = split, index
        self._begin()
        task = self.task
        messages: list[Message] = copy.deepcopy(task.row["question"][0])
        if self.system:
            words = _SYSTEM if task.is_multi_turn else _SYSTEM_SINGLE
            if messages[0]["role"] == "system":
                words += f"\n\n{messages.pop(0)['content']}"
            messages.insert(0, {"role": "system", "content": words})
        return messages

    def _begin(self) -> None:
        task = self.task
        self.tools = [_tool(document) for document in _functions(task)[0]]
        self.apis: dict[str, Any] = make_apis(task) if task.is_multi_turn else {}
        self.turn = self.num_steps = self.num_right = 0
        self.num_calls = 0
        """Calls in the user's turn."""
        self._num_done = 0
        """Calls of the ground truth, in its order, that are among them: where the oracle goes on."""
        self.responses: list[str] = []
        self._calls: list[Call] = []
        self._num_awaited = 0

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], Any, bool, bool, dict[str, Any]]:
        """Carry out an assistant message; in a single turn its calls are judged together."""
        calls = as_message(action).get("tool_calls") or ()
        self._calls, self._num_awaited = [], len(calls)
        self.num_steps += bool(calls)
        return super().step(action)

    def run_tool(self, name: str, arguments: Any) -> str:
        """Carry out one call."""
        self._num_awaited -= 1
        try:
            if self.task.is_multi_turn:
                return self._carry_out(name, arguments)
            return self._note(name, arguments)
        finally:
            if self._num_awaited == 0:
                self._end_message()

    def _carry_out(self, name: str, arguments: Any) -> str:
        call = _written(name, arguments)
        self.num_calls += 1
        right = expected_turns(self.task)[self.turn].calls
        self._num_done += call in right[self._num_done : self._num_done + 1]
        try:
            response = respond(self.apis, call)
        except ToolCallError as error:
            self.responses.append(f"Error during execution: {error}")
            raise
        self.responses.append(response)
        return response

    def _note(self, name: str, arguments: Any) -> str:
        self._calls.append(_NO_CALL)  # a call that cannot be read is one, and wrong
        call = self._calls[-1] = _written(name, arguments)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        if call.name not in schemas:
            raise ToolCallError(f"unknown tool {call.name!r}; the tools are {', '.join(schemas)}")
        if unknown := call.arguments.keys() - schemas[call.name].get("properties", {}).keys():
            raise ToolCallError(f"wrong arguments for {call.name}: {', '.join(sorted(unknown))}")
        return "Noted."

    def _end_message(self) -> None:
        if not self.task.is_multi_turn:
            self._judge()
        elif self.num_steps > self.max_steps:
            self._fail("multi_turn:force_terminated")

    def _judge(self) -> None:
        if (error := check_calls(self.task, self._calls)) is not None:
            self._fail(error)
            return
        self.reward(1.0)
        self.finish(success=True)

    def answer(self, text: str) -> Sequence[Message] | None:  # noqa: ARG002 - BFCL reads no text
        """End the user's turn."""
        if not self.task.is_multi_turn:
            self._judge()
            return None
        if (error := self._error_of_turn()) is not None:
            self._fail(error)
            return None
        turns = expected_turns(self.task)
        if turns[self.turn].calls:
            self.num_right += 1
            if self.turn_rewards:
                self.reward(1 / self._num_checked, "turn")
        self.turn += 1
        self.num_steps = self.num_calls = self._num_done = 0
        if self.turn < len(turns):
            return self._question()
        if not self.turn_rewards:
            self.reward(1.0, "task")
        self.finish(success=True)
        return None

    @property
    def _num_checked(self) -> int:
        return sum(bool(turn.calls) for turn in expected_turns(self.task))

    def _error_of_turn(self) -> str | None:
        """Return what BFCL's checker finds wrong in the user's turn that ends."""
        expected = expected_turns(self.task)[self.turn]
        if not expected.calls:
            return None
        if not self.num_calls:
            return "multi_turn:empty_turn_model_response"
        found = state_checker(self.apis, expected.apis)
        if found["valid"]:
            found = response_checker(self.responses, expected.responses, self.turn)
        return None if found["valid"] else str(found["error_type"])

    def _fail(self, error: str) -> None:
        self._info["bfcl_error"] = error
        self.finish(success=False, score=self.num_right / self._num_checked if self.task.is_multi_turn else 0.0)

    def _question(self) -> Sequence[Message]:
        later = _functions(self.task)[1].get(self.turn, [])
        if not later:
            messages: list[Message] = copy.deepcopy(self.task.row["question"][self.turn])
            return messages
        schemas = "\n".join(json.dumps(_tool(document)) for document in later)
        return [{"role": "user", "content": f"{schemas}\n{MORE_FUNCTIONS}"}]

    def state_key(self) -> str:
        """Return a key of the turn, the state of the APIs, and which of the responses that are still asked for came."""
        if not self.task.is_multi_turn:
            return self.task.id
        asked = {response for turn in expected_turns(self.task)[self.turn :] for response in turn.responses}
        came = Counter(response for response in self.responses if response in asked)
        states = {name: _state(api) for name, api in self.apis.items()}
        moment = repr((self.task.id, self.turn, self.num_calls > 0, sorted(came.items()), states))
        return hashlib.sha256(moment.encode(errors="backslashreplace")).hexdigest()

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Call as the ground truth does, one call a message if the limit allows; a wrong turn changes a call or makes none."""
        rng = np.random.default_rng() if rng is None else rng
        calls = self._right_calls()
        if rng.random() >= skill:
            calls = self._wrong_calls(calls, rng)
        if not calls:
            words = "Done." if self.num_calls else "I cannot do that with the tools and the values that I have."
            return {"role": "assistant", "content": words}
        messages = [tool_call(call.name, **call.arguments) for call in calls]
        entries = [entry | {"id": f"call_{k}"} for k, each in enumerate(messages) for entry in each["tool_calls"]]
        return messages[0] | {"tool_calls": entries}

    def _right_calls(self) -> list[Call]:
        task = self.task
        if task.is_multi_turn:
            calls = expected_turns(task)[self.turn].calls
            num = -(-len(calls) // self.max_steps)
            return list(calls[self._num_done : self._num_done + num])
        if task.answer:
            return [_accepted(call, task.row["function"]) for call in task.answer]
        first = self.tools[0]["function"]["name"] if self.tools else ""
        return [Call(name=first, arguments={})] if task.category == "live_relevance" else []

    def _wrong_calls(self, calls: Sequence[Call], rng: np.random.Generator) -> list[Call]:
        if not calls and self.tools:
            return [Call(name=self.tools[int(rng.integers(len(self.tools)))]["function"]["name"], arguments={})]
        changeable = [(k, name) for k, call in enumerate(calls) for name in call.arguments]
        if not changeable or rng.random() < 0.5:
            return []
        place, name = changeable[int(rng.integers(len(changeable)))]
        arguments = dict(calls[place].arguments)
        value = arguments.pop(name)
        if isinstance(value, int | float):
            arguments[name] = value + 1
        return [Call(name=each.name, arguments=arguments) if k == place else each for k, each in enumerate(calls)]


def _state(api: Any) -> dict[str, str]:
    """Return the state of an API as text. A folder is shown by its path, a generator by what it will draw."""

    def shown(name: str, value: Any) -> str:
        if name == "_current_dir":
            return repr(api.pwd())
        return repr(value.getstate() if isinstance(value, random.Random) else value)

    return {name: shown(name, value) for name, value in vars(api).items()}


def _accepted(call: Mapping[str, Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]) -> Call:
    """Return a call with the first accepted value of each argument that may not be absent."""
    ((name, options),) = call.items()
    required = next(each["parameters"].get("required", []) for each in functions if each["name"] == name)
    return Call(name=_plain_name(name), arguments=_first_values(options, required))


def _first_values(options: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the first accepted value by name. "" among the accepted ones means that there may be none."""
    found = {}
    for name, values in options.items():
        given = values if isinstance(values, list) else [values]  # a few values stand alone
        kept = [value for value in given if value != ""]
        if kept and (len(kept) == len(given) or name in required):
            found[name] = _first_value(kept[0])
    return found


def _first_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _first_values(value)
    return [_first_value(each) for each in value] if isinstance(value, list) else value
