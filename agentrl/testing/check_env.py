"""Proof that an environment and its wrappers keep the contract of `agentrl.MessageEnv`, with a line for each breach."""

import itertools
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env as check_gymnasium

from agentrl.env import EnvDescription, MessageEnv, ToolEnv, as_message, close_env, describe, make_env
from agentrl.env.make import CALL_ID, bad_actions, call, is_schema, likely_arguments
from agentrl.env.tool_env import tool_specs
from agentrl.errors import CheckError, EnvironmentFailure
from agentrl.rollout import Tasks
from agentrl.rollout.env_driver import MakeEnv, reset, step
from agentrl.rollout.reset_checks import find_overlap, reset_proof
from agentrl.rollout.tasks import EnvTask
from agentrl.testing.env_session import Hang, Problem, Report, Session, StepResult, new_session
from agentrl.types import Message, Need

_TURNS = 6


def check_wrappers(make: Callable[[], Session], seed: int) -> None:
    """Play the first turns of a task as a rollout does, with the wrappers around the environment."""
    session = make()
    made, env = session.made, session.env
    if made is env:
        return
    session.report.call("reset() in its wrappers", partial(reset, made, env, EnvTask(seed=seed), rollout_index=0))
    for _ in range(_TURNS):
        action = session.oracle() if session.has_oracle else as_message("Hello.")
        reply = session.report.call("step() in its wrappers", partial(step, made, env, action))
        if reply.terminated or reply.truncated:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEnv:
    """Proofs about an environment, and what could not be proven."""

    name: str
    lines: tuple[str, ...]
    """Plain sentences, one fact each."""

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"- {line}" for line in self.lines)])


def look_at(name: str, make_env: MakeEnv, env: MessageEnv, *, num_seeds: int, notes: Mapping[str, str]) -> CheckedEnv:
    """Look at what is no matter of right and wrong; the environment has passed all checks.

    Args:
        name: of the environment.
        make_env: makes one.
        env: one of them.
        num_seeds: how many were tried.
        notes: kinds of copies that cannot be made, with what that costs.
    """
    return CheckedEnv(name=name, lines=tuple(_lines(make_env, env, describe(env), num_seeds, notes)))


def _lines(
    make_env: MakeEnv, env: MessageEnv, description: EnvDescription, num_seeds: int, notes: Mapping[str, str]
) -> Iterator[str]:
    yield f"a seed begins the same task again, and plays alike with the same actions ({num_seeds} seeds tried)"
    yield f"{len(list(bad_actions(description.tools)))} kinds of nonsense are answered with messages"
    kinds = [kind for kind in (["fork()"] if env.can_fork else []) + ["pickle"] if kind not in notes]
    if kinds:
        yield f"copies by {' and '.join(kinds)} play like the original"
    yield from notes.values()
    has_oracle = type(env).oracle is not MessageEnv.oracle
    yield "the oracle ends each task that was tried" if has_oracle else "it has no oracle(), so warmup.steps must be 0"
    needs = description.needs - ({Need.BRANCHES} if "fork()" in notes else set())
    for need in sorted(needs):
        yield f"credit schemes may read {need.value}"
    if missing := sorted({Need.STATE_KEYS, Need.ANSWER_LOGPROBS, Need.BRANCHES} - needs):
        yield f"credit schemes may not read {', '.join(need.value for need in missing)}"
    tasks = Tasks(seed=0, num=description.num_tasks)
    yield from _about_splits(make_env, tasks)
    proof = reset_proof(make_env, tasks)
    if proof.flaw is None:
        yield "reset() forgets the episodes before it, so an environment plays many of them"
    else:
        yield f"each episode has an environment of its own: {proof.flaw}"
    if (words := proof.warning(live=64)) is not None:
        yield words


def _about_splits(make_env: MakeEnv, tasks: Tasks) -> Iterator[str]:
    for split, num in zip(tasks.num._fields, tasks.num, strict=True):
        if num is not None:
            yield f"its {split} split has {num} tasks"
    found = find_overlap(make_env, tasks)
    if found is None:
        return
    told = found.warning()
    if told is None:
        yield f"{found.num_shared} of {found.num_evaluation} evaluation tasks are among {found.num_training} training tasks"
    else:
        yield told


_MAX_TURNS = 100
_PROBE_TURNS = 6
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_env(
    make: str | type[MessageEnv] | Callable[..., gym.Env[Any, Any]],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    timeout_s: float = 10.0,
    **options: Any,
) -> CheckedEnv:
    """Check an environment; return what was proven of it, or list everything that is wrong with it at once.

    Seeds may all begin the same task (an environment may have only one), but a seed must always begin the same one.

    Args:
        make: what a recipe's `env.id` takes, or a class or function that makes a fresh environment at each call.
            Wrappers are looked through, and a few turns are played in them.
        seeds: tasks to try.
        timeout_s: deadline of each call of the environment, in seconds.
        options: options of the environment.

    Raises:
        ValueError: for no seeds, with which nothing would be checked.
        CheckError: with one line for each thing that is wrong: the method at fault, what it did, and the fix.
    """
    if not seeds:
        raise ValueError("seeds: give at least one; with none, nothing is checked")
    report = Report(timeout_s=timeout_s)
    build = (lambda: make_env(make, options)) if isinstance(make, str) else (lambda: make(**options))
    name = make if isinstance(make, str) else getattr(make, "__name__", repr(make))
    checks = [_tools, _reset, _garbage, _determinism, _fork, _pickle, _oracle, _end, _rollout_index]
    checks += [_splits, _close, _gymnasium, check_wrappers]
    global_states = random.getstate(), np.random.get_state()
    try:
        new_session(report, build).close()
        for check in checks:
            num_before = len(report.lines())
            for seed in seeds if check in (_reset, _determinism, _fork, _oracle) else seeds[:1]:
                with report.collecting():
                    check(lambda: new_session(report, build), seed)
                report.close_sessions()
                if len(report.lines()) > num_before:  # the other seeds would say the same
                    break
        if not report.lines():
            env = new_session(report, build).env
            look = partial(look_at, str(name), build, env, num_seeds=len(seeds), notes=report.notes)
            found: CheckedEnv = report.call("an episode after other episodes", look, num_calls=6, extra_s=10.0)
            report.close_sessions()
            return found
    except Problem as problem:  # it cannot be made, or it hangs: there is nothing more to learn
        report.add(problem.line)
    finally:
        random.setstate(global_states[0])
        np.random.set_state(global_states[1])
        report.close()
    lines = report.lines()
    raise CheckError("\n- ".join([f"{name}: {len(lines)} problem{'s' if len(lines) > 1 else ''}", *lines]))


Make = Callable[[], Session]


def _tools(make: Make, seed: int) -> None:  # noqa: ARG001 - tools do not depend on the seed
    session = make()

    def look() -> str | None:
        try:
            describe(session.env)
        except EnvironmentFailure as error:
            return str(error)
        return None

    if line := session.report.call("provides()", look):
        session.add(line)
    names = []
    for schema in session.tools():
        function = schema["function"]
        session.add_if(
            schema.get("type") != "function",
            f"tools: {function['name']!r} has the type {schema.get('type')!r}; give {{'type': 'function', ...}}",
        )
        name, parameters = function.get("name"), function.get("parameters")
        names.append(name)
        if not (isinstance(name, str) and _TOOL_NAME.fullmatch(name)):
            session.add(f"tools: {name!r} is no tool name; use 1 to 64 letters, digits, '_' and '-'")
        if not function.get("description"):
            session.add(f"tools: {name!r} has no description; the first line of the method's docstring becomes one")
        if not (isinstance(parameters, dict) and parameters.get("type") == "object"):
            session.add(f"tools: parameters of {name!r} must be a JSON schema of type 'object'")
    for spec in tool_specs(type(session.env)).values():
        for name in spec.untyped:
            session.add(
                f"tools: parameter {name!r} of {spec.name!r} has no type hint, so the model is not told what to give and any "
                f"value reaches the tool; write one, such as {name}: int"
            )
    session.add_if(len(set(names)) < len(names), "tools: two tools have one name; rename one")


def _reset(make: Make, seed: int) -> None:
    firsts = []
    for global_seed in (1, 2):
        _seed_globally(global_seed)
        session = make()
        firsts.append((session.reset(seed), session.key()))
        session.add_if(not firsts[0][0], "reset() returned no messages; the first says what the task is")
    first, second = firsts
    if first != second:
        session.add(
            f"reset(): seed {seed} began different tasks in two environments ({_differ(first, second)}); "
            "call super().reset(seed=seed) and draw from self.np_random alone"
        )
    again = session.reset(seed)
    session.add_if(
        second[0] == first[0] and again != first[0],
        f"reset(): seed {seed} began another task the second time ({_differ(again, first[0])}); "
        "set everything again in reset(), keep nothing of the last episode",
    )


def _garbage(make: Make, seed: int) -> None:
    """Step with what a bad model writes: it must be answered, whatever it is."""
    session = make()
    raised: dict[str, tuple[str, list[str]]] = {}  # by the kind of exception: what was said first, and every occasion
    for what, action, must_fail in bad_actions(session.tools()):
        session.reset(seed)
        try:
            result = session.step(action)
        except Hang:
            raise
        except Problem as problem:
            kind = problem.words.partition(":")[0] or problem.line
            raised.setdefault(kind, (problem.line, []))[1].append(what)
            continue
        _check_reply(session, what, result, must_fail=must_fail)
    for line, whats in raised.values():
        listed = ", ".join(whats[:3]) + (f" and {len(whats) - 3} more" if len(whats) > 3 else "")
        advice = f" when the action was {listed}; answer whatever the model writes with a message"
        session.add(line + (advice if line.startswith("step() raised") else ""))


def _check_reply(session: Session, what: str, result: StepResult, *, must_fail: bool) -> None:
    replies = [m for m in result.observation if m["role"] == "tool"]
    session.add_if(
        bool(replies) and all(m.get("tool_call_id") != CALL_ID for m in replies),
        "step() answers a tool call without its id; copy call['id'] to the tool message's 'tool_call_id'",
    )
    if must_fail and isinstance(session.env, ToolEnv):
        content = str(replies[0]["content"]) if replies else ""
        session.add_if(
            not content.startswith("Error:"),
            f"step() must answer {what} with a tool message that begins with 'Error:', "
            f"got {_short(result.observation)}; leave tool calls to ToolEnv.step()",
        )
        limit = session.env.max_error_chars + 60  # the note that says what was cut
        session.add_if(
            len(content) > limit,
            f"step() answers {what} with an error of {len(content)} characters; keep it within {limit}",
        )


def _determinism(make: Make, seed: int) -> None:
    played = []
    for global_seed in (1, 2):
        _seed_globally(global_seed)
        session = make()
        first = session.reset(seed)
        actions, results = _probe(session)
        played.append((first, list(zip(actions, results, strict=True))))
        _check_history(session, [first, *(result.observation for result in results)])
    (first, turns), (other_first, other_turns) = played
    session.report.is_deterministic = played[0] == played[1]
    if first != other_first:
        return  # said by the check of reset()
    for (action, result), (other_action, other_result) in zip(turns, other_turns, strict=False):
        if action != other_action or result != other_result:
            method, a, b = (
                ("oracle()", action, other_action) if action != other_action else ("step()", result, other_result)
            )
            session.add(
                f"{method}: the same seed and actions gave different results in two environments ({_differ(a, b)}); "
                "draw from self.np_random alone, and read no clock and no global random numbers"
            )
            return


def _check_history(session: Session, observations: Sequence[tuple[Message, ...]]) -> None:
    repeats = [b[: len(a)] == a and len(b) > len(a) > 0 for a, b in itertools.pairwise(observations)]
    speaks = any(m["role"] == "assistant" for observation in observations[1:] for m in observation)
    if speaks or (len(repeats) >= 2 and all(repeats)):
        session.add("step() returns the dialogue so far; return only the messages that are new since the last action")


def _fork(make: Make, seed: int) -> None:
    for num_before in range(3):
        session = make()
        session.reset(seed)
        if not session.attribute("can_fork") or any(r.is_end for r in _probe(session, num_before)[1]):
            return
        num_known = len(session.report.lines())
        is_own = type(session.env).fork is not MessageEnv.fork
        cost = "schemes that read branches (tree) cannot be used; override fork(), or set can_fork = False"
        with nullcontext() if is_own else _noting(session, "fork()", cost):
            copy = session.fork()
        if "fork()" in session.report.notes:
            return
        _compare_copies(session, copy, "fork()", "copy everything that changes, self.np_random included")
        if len(session.report.lines()) > num_known:
            return


@contextmanager
def _noting(session: Session, kind: str, cost: str) -> Iterator[None]:
    """Note that a kind of copy cannot be made, and what that costs; training works without."""
    try:
        yield
    except Hang:
        raise
    except Problem as problem:
        if not problem.words:  # it returned something, which is wrong
            raise
        session.report.notes[kind] = f"no copies by {kind} ({problem.words}): {cost}"


def _pickle(make: Make, seed: int) -> None:
    session = make()
    session.reset(seed)
    if any(r.is_end for r in _probe(session, 1)[1]):
        session.reset(seed)
    fix = "can_snapshot is True: define its class at the top of a module and keep no open handles in it"
    is_needed = session.attribute("can_snapshot")  # as a rollout asks before it pickles
    cost = "after a kill its actions are taken again, and can_snapshot must stay False"
    with nullcontext() if is_needed else _noting(session, "pickle", cost):
        copy = session.report.call("pickle", lambda: pickle.loads(pickle.dumps(session.env)), fix=fix)
    if "pickle" in session.report.notes:
        return
    _compare_copies(session, Session(copy, session.report), "pickle", "restore everything that changes")


def _compare_copies(session: Session, copy: Session, what: str, fix: str) -> None:
    """Play the copy, and then the original with the same actions: it must not have moved, and must then go alike."""
    key = session.key()
    if copy.key() != key:
        session.add(f"{what}: state_key() of the copy is {copy.key()!r}, of the original {key!r}; {fix}")
        return
    actions, results = _probe(copy)
    if session.key() != key:
        session.add(
            f"{what}: stepping the copy moved the original (state_key() {key!r} became {session.key()!r}); {fix}"
        )
        return
    for action, expected in zip(actions, results, strict=True):
        try:
            got = session.step(action)
        except Hang:
            raise
        except Problem as problem:
            session.add(f"{what}: the original fails where its copy did not ({problem.line}); {fix}")
            return
        if got != expected:
            if session.report.is_deterministic:
                session.add(f"{what}: the copy and the original answer the same action differently "
                            f"({_differ(expected, got)}); {fix}")  # fmt: skip
            return


def _oracle(make: Make, seed: int) -> None:
    session = make()
    if not session.has_oracle:
        return
    session.reset(seed)
    rewards = []
    for _ in range(_MAX_TURNS):
        key, state = session.key(), session.random_state()
        session.oracle(skill=0.5, rng=np.random.default_rng(seed))
        action = session.oracle()
        session.add_if(
            session.key() != key or session.random_state() != state,
            "oracle() changed the environment; it only looks, and draws from `rng`",
        )
        result = session.step(action)
        rewards.append(result.reward)
        if result.is_end:
            break
    else:
        session.add(f"oracle(): seed {seed} is not solved within {_MAX_TURNS} turns; play right at every turn")
        return
    session.add_if(result.truncated, f"oracle(): seed {seed} ends truncated, not solved; play within the limit")
    session.add_if(
        result.info.get("success") is False,
        f"oracle(): seed {seed} ends without success; play right at every turn when skill is 1",
    )
    early = [turn for turn, reward in enumerate(rewards[:-1]) if reward != 0]
    if early and not session.attribute("turn_rewards"):
        session.add(f"step(): turn {early[0]} has a reward of {rewards[early[0]]} although turn_rewards is False; "
                    "pay at the end alone, or set turn_rewards = True")  # fmt: skip


def _end(make: Make, seed: int) -> None:
    """After its end an environment may refuse a step, but a reset must bring it back."""
    session = make()
    first = session.reset(seed)
    for _ in range(_MAX_TURNS // _PROBE_TURNS):
        actions, results = _probe(session)
        if results[-1].is_end:
            break
    else:
        return
    try:
        session.step(actions[-1])
    except Hang:
        raise
    except Problem:
        pass  # any refusal is good
    session.add_if(
        session.reset(seed) != first, "reset() after the end begins another task; set everything again in it"
    )


def _rollout_index(make: Make, seed: int) -> None:
    firsts = []
    for index in (0, 1):
        session = make()
        firsts.append(session.reset(seed, options={"rollout_index": index}))
    session.add_if(
        firsts[0] != firsts[1],
        "reset(): options['rollout_index'] changed the first messages; the task follows from seed, and only what "
        "comes later may follow from the index",
    )


def _splits(make: Make, seed: int) -> None:
    """The first and the last task of each split that is a table."""
    session = make()
    num_tasks = session.report.call("num_tasks()", lambda: describe(session.env).num_tasks)
    for split, num in zip(num_tasks._fields, num_tasks, strict=True):
        for index in {0, num - 1} if num else ():
            options = {"rollout_index": 0, "split": split, "task_index": index}
            session.add_if(
                session.reset(seed, options) != session.reset(seed, options),
                f"reset(): task {index} of the {split} split began otherwise the second time; take it by options['task_index']",
            )


def _close(make: Make, seed: int) -> None:
    session = make()
    session.reset(seed)
    session.close()
    session.report.call("close() called again", partial(close_env, session.env), fix="closing twice must be harmless")


def _gymnasium(make: Make, seed: int) -> None:  # noqa: ARG001 - it has seeds of its own
    session = make()

    def check() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_gymnasium(session.env, skip_render_check=True, skip_close_check=True)

    try:
        session.report.call("Gymnasium's check_env", check, num_calls=20)
    except Hang:
        raise
    except Problem as problem:
        # What the environment itself raised is listed by the checks above.
        session.add_if(not problem.words or not session.report.mentions(problem.words), problem.line)


def _probe(session: Session, max_turns: int = _PROBE_TURNS) -> tuple[list[str | Message], list[StepResult]]:
    """Play a few turns, well where there is an oracle, and return actions and results."""
    tried = [call(s["function"]["name"], likely_arguments(s)) for s in session.tools() if is_schema(s)]
    blind: Iterator[str | Message] = itertools.cycle([*tried, "hello"])
    actions: list[str | Message] = []
    results: list[StepResult] = []
    while len(actions) < max_turns and not (results and results[-1].is_end):
        action: str | Message = session.oracle() if session.has_oracle else next(blind)
        actions.append(action)
        results.append(session.step(action))
    return actions, results


def _seed_globally(seed: int) -> None:
    """Make what draws from the global generators differ from one environment to the next."""
    random.seed(seed)
    np.random.seed(seed)


def _differ(a: object, b: object) -> str:
    """Name the innermost place where two pieces of data differ."""
    if type(a) is type(b) and isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return next((_differ(x, y) for x, y in zip(a, b, strict=True) if x != y), "")
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((f"{key} {_differ(a[key], b[key])}" for key in a if a[key] != b[key]), "")
    return f"{_short(a)} and {_short(b)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
