"""Checks of an environment's `reset` before a run begins.

`measure_overlap` counts evaluation tasks that are also training tasks; `prove_reset` finds out whether `reset` forgets earlier
episodes, so that one environment may play several.
"""

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import psutil

from agentrl.data.plain import abbreviated
from agentrl.env import MessageEnv, as_message, ask_oracle, base_env, close_env
from agentrl.env.make import bad_actions, call, is_schema, likely_arguments
from agentrl.errors import EnvError
from agentrl.rollout.env_driver import Env, EnvReply, EnvThread, MakeEnv, construct, reset, step
from agentrl.rollout.faults import describe_error
from agentrl.rollout.limits import num_open_files
from agentrl.rollout.tasks import EnvTask, Tasks
from agentrl.types import Message

_EVALUATION_TASKS, _TRAINING_TASKS = 64, 256
"""Largest numbers of tasks that are compared."""
_OVERLAP_LIMIT_S = 4.0
"""Time limit, in seconds: half for each split."""
_WARN_FROM = 0.1
"""Fraction from which a warning is given; below it, first messages may be equal by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Evaluation tasks that occur among the first training tasks, by first messages, gold answer and state key."""

    num_shared: int
    num_evaluation: int
    num_training: int

    def warning(self) -> str | None:
        """Return a warning if the overlap is large. None: it is not."""
        if self.num_shared < max(1, _WARN_FROM * self.num_evaluation):
            return None
        return (
            f"{self.num_shared} of {self.num_evaluation} evaluation tasks also occur among the first {self.num_training} "
            "training tasks (first messages, gold_answer() and state_key() are alike), so evaluation shows what was "
            "trained on. Draw the tasks of each split from a half of their own, in start():\n"
            "    numbers = range(0, 1000, 2) if options.get('split') == 'eval' else range(1, 1000, 2)\n"
            "    self.number = numbers[int(self.np_random.integers(len(numbers)))]\n"
            "    return f'Find {self.number}.'  # or, of a table, define num_tasks() and take options['task_index']"
        )


async def measure_overlap(make_env: MakeEnv, tasks: Tasks, *, timeout_s: float) -> Overlap | None:
    """Run `find_overlap` on a thread. None: there is nothing to compare, or the environment failed, which the run counts.

    Args:
        make_env: makes the environment.
        tasks: tasks of the run.
        timeout_s: deadline of construction, and of each reset, in seconds.
    """
    with EnvThread() as thread:
        try:
            return await thread.call(lambda: find_overlap(make_env, tasks), timeout_s=2 * timeout_s + _OVERLAP_LIMIT_S)
        except Exception:  # noqa: BLE001 - foreign environment, which was tried before
            return None


def find_overlap(make_env: MakeEnv, tasks: Tasks) -> Overlap | None:
    """Compare evaluation tasks with the first training tasks, for at most a few seconds.

    None: the environment defines the splits itself (`num_tasks`).
    """
    if tasks.num.train is not None or tasks.num.eval is not None:
        return None
    env = construct(make_env)
    try:
        base = base_env(env)

        def identities(some: Iterable[EnvTask]) -> list[bytes]:
            end = time.monotonic() + _OVERLAP_LIMIT_S / 2
            in_time = takewhile(lambda _: time.monotonic() < end, some)
            replies = (reset(env, base, task, rollout_index=0) for task in in_time)
            return [_digest(reply) for reply in replies]

        evaluated = identities(tasks.evaluation(_EVALUATION_TASKS))
        trained = identities(map(tasks.train, range(_TRAINING_TASKS)))
    finally:
        close_env(env)
    known = set(trained)
    return Overlap(
        num_shared=sum(identity in known for identity in evaluated),
        num_evaluation=len(evaluated),
        num_training=len(trained),
    )


def _digest(reply: EnvReply) -> bytes:
    identity = repr((reply.messages, reply.gold_answer, reply.state_key))
    return hashlib.sha256(identity.encode(errors="backslashreplace")).digest()


_TURNS, _TURNS_TO_END = 6, 60
_LIMIT_S = 5.0
"""Time limit of the proof without constructions, in seconds."""
_LIMIT_CONSTRUCTIONS = 6
"""Time limit of the proof for constructions, in construction times."""
_BAD_ACTIONS_S = 1.0
"""Time limit of bad actions, in seconds."""
_HUGE_S = 10.0
"""Construction time beyond which there is no proof, in seconds."""
_SLOW_S = 0.05
"""Construction time from which a warning is given, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetProof:
    """Result of playing tasks in fresh environments, and again in one that had played others."""

    flaw: str | None
    """Reason against playing several episodes in one environment. None: none was found."""
    construction_s: float
    """Time of the last construction, in seconds; the first one may fill caches."""

    def warning(self, *, live: int) -> str | None:
        """Return a warning if construction is slow, with `live` episodes at once. None: it is quick."""
        if self.construction_s < _SLOW_S:
            return None
        often = f"for each of {live} live episodes" if self.flaw is None else f"for every episode, because {self.flaw}"
        return (
            f"constructing the environment takes {self.construction_s:.2g} s, {often}: hold what its instances share at "
            "module level, behind functools.cache, and set in reset() what belongs to a task"
        )


class _TooSlowError(Exception):
    pass


class _FlawError(Exception):
    pass


async def prove_reset(make_env: MakeEnv, tasks: Tasks, *, timeout_s: float) -> ResetProof:
    """Run `reset_proof` on a thread, in bounded time.

    Args:
        make_env: makes the environment.
        tasks: tasks of the run.
        timeout_s: deadline of each call, in seconds.
    """
    with EnvThread() as thread:
        try:
            return await thread.call(lambda: reset_proof(make_env, tasks), timeout_s=2 * timeout_s + _LIMIT_S)
        except Exception:  # noqa: BLE001 - it hangs: the run will count it
            return ResetProof(flaw="it did not return", construction_s=0.0)


def reset_proof(make_env: MakeEnv, tasks: Tasks) -> ResetProof:
    """Play a few tasks in fresh environments, and again in one that plays others in between: all must be equal.

    Those in between are left unfinished, played to the end and given bad actions. The time is bounded.
    """
    prober = _Prober(make_env)
    try:
        prober.compare(_some(tasks))
        flaw = None
    except _TooSlowError:
        flaw = "it is too slow to prove that reset() forgets the episode before"
    except _FlawError as found:
        flaw = str(found)
    except Exception as error:  # noqa: BLE001 - foreign environment: the run will count it
        words = str(error) if isinstance(error, EnvError) else describe_error(error)
        flaw = f"it failed when it was tried ({words})"
    finally:
        prober.close()
    return ResetProof(flaw=flaw, construction_s=prober.construction_s)


def _some(tasks: Tasks) -> list[EnvTask]:
    """Return three tasks, from both splits if there are two."""
    trained = [] if tasks.num.train == 0 else [tasks.train(0), tasks.train(1)]
    evaluated = [] if tasks.num.eval == 0 else tasks.evaluation(3)
    return [*trained, *evaluated][:3]


class _Prober:
    """Environments under proof, and the time left for it."""

    def __init__(self, make_env: MakeEnv) -> None:
        self._make_env = make_env
        self._made: list[Env] = []
        self._deadline = time.monotonic() + _LIMIT_S
        self.construction_s = 0.0

    def compare(self, tasks: Sequence[EnvTask]) -> None:
        """Raise _FlawError if a task plays differently after others."""
        used = self._make()
        if not base_env(used).can_reuse:
            raise _FlawError("its can_reuse is False")
        opened = None
        between = [self._leave_in_the_middle, self._play_to_the_end, self._give_bad_actions]
        for index, task in enumerate(tasks):
            one = self._make()
            actions, fresh = self._play(one, task, index)
            self._made.remove(one)
            close_env(one)
            used = between[index](used, tasks[(index + 1) % len(tasks)])
            _, again = self._play(used, task, index, actions)
            for turn, (a, b) in enumerate(zip(fresh, again, strict=False)):
                if a != b:
                    raise _FlawError(f"after other tasks, it plays one otherwise ({_difference(a, b, turn)})")
            if len(fresh) != len(again):
                raise _FlawError("after other tasks, it ends one otherwise")
            opened = opened or _opened()
        if opened is not None and any(now > before for now, before in zip(_opened(), opened, strict=True)):
            raise _FlawError("reset() leaves files or processes open that an earlier task began with")

    def close(self) -> None:
        """Close all environments."""
        for env in self._made:
            try:
                close_env(env)
            except Exception:  # noqa: BLE001 - foreign environment: the run will count it
                continue

    def _make(self) -> Env:
        self._check_time()
        begin = time.monotonic()
        env = construct(self._make_env)
        self._made.append(env)
        self.construction_s = took_s = time.monotonic() - begin
        if took_s > _HUGE_S:
            raise _TooSlowError
        self._deadline += _LIMIT_CONSTRUCTIONS // 3 * took_s
        return env

    def _play(
        self, env: Env, task: EnvTask, index: int, actions: Sequence[Message] | None = None
    ) -> tuple[list[Message], list[EnvReply]]:
        """Play a few turns with the given actions, or plausible ones; return the actions and the replies."""
        base, taken = base_env(env), []
        replies = [self._reset(env, task, index)]
        for number in range(_TURNS if actions is None else len(actions)):
            taken.append(self._action(base, number) if actions is None else actions[number])
            replies.append(self._step(env, taken[-1]))
            if replies[-1].terminated or replies[-1].truncated:
                break
        return taken, replies

    def _leave_in_the_middle(self, env: Env, task: EnvTask, *, turns: int = 2) -> Env:
        self._reset(env, task, 0)
        for number in range(turns):
            reply = self._step(env, self._action(base_env(env), number))
            if reply.terminated or reply.truncated:
                break
        return env

    def _play_to_the_end(self, env: Env, task: EnvTask) -> Env:
        return self._leave_in_the_middle(env, task, turns=_TURNS_TO_END)

    def _give_bad_actions(self, env: Env, task: EnvTask) -> Env:
        """Give bad actions; return another environment if this one fails, as the run does."""
        is_over, end = True, time.monotonic() + _BAD_ACTIONS_S
        try:
            for _, action, _ in bad_actions(base_env(env).tools):
                if time.monotonic() > end:
                    break
                if is_over:
                    self._reset(env, task, 0)
                reply = self._step(env, as_message(action))
                is_over = reply.terminated or reply.truncated
        except _TooSlowError:
            raise
        except Exception:  # noqa: BLE001 - foreign environment, which may reject bad actions
            return self._make()
        return env

    def _reset(self, env: Env, task: EnvTask, index: int) -> EnvReply:
        self._check_time()
        return reset(env, base_env(env), task, rollout_index=index)

    def _step(self, env: Env, action: Message) -> EnvReply:
        self._check_time()
        return step(env, base_env(env), action)._replace(snapshot=None)

    def _action(self, base: MessageEnv, number: int) -> Message:
        if type(base).oracle is not MessageEnv.oracle:
            return ask_oracle(base, rng=np.random.default_rng(number))
        return next(itertools.islice(_blind_actions(base), number, None))

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _TooSlowError


def _blind_actions(base: MessageEnv) -> Iterator[Message]:
    calls = [call(tool["function"]["name"], likely_arguments(tool)) for tool in base.tools if is_schema(tool)]
    return itertools.cycle([*calls, {"role": "assistant", "content": "hello"}])


def _opened() -> tuple[int, int]:
    """Return the numbers of open files and child processes of this process."""
    process = psutil.Process()
    return num_open_files(process), len(process.children(recursive=True))


def _difference(a: EnvReply, b: EnvReply, turn: int) -> str:
    name = next(name for name in EnvReply._fields if getattr(a, name) != getattr(b, name))
    return f"turn {turn}, {name}: {abbreviated(getattr(a, name))} became {abbreviated(getattr(b, name))}"
