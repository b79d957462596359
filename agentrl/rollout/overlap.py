"""How many evaluation tasks are training tasks under another seed, looked at before a run begins."""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from agentrl.env import base_env, close_env
from agentrl.rollout.env_calls import EnvReply, MakeEnv, construct, reset
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.tasks import EnvTask, Tasks

_EVALUATION_TASKS, _TRAINING_TASKS = 64, 256
"""Looked at, at most."""
_OVERLAP_LIMIT_S = 4.0
"""How long to look, in seconds: half for each split."""
_TOLD_FROM = 0.1
"""Share that is told. Below it, first words that are alike by chance look the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Evaluation tasks that occur among the first training tasks, by all that shows of a task at its beginning."""

    num_shared: int
    num_evaluation: int
    num_training: int

    def words(self) -> str | None:
        """Return what to tell. None: nothing."""
        if self.num_shared < max(1, _TOLD_FROM * self.num_evaluation):
            return None
        return (
            f"{self.num_shared} of {self.num_evaluation} evaluation tasks also occur among the first {self.num_training} "
            "training tasks (first messages, gold_answer() and state_key() are alike), so evaluation shows what was "
            "trained on: tell the splits apart by options['split'] or num_tasks()"
        )


async def overlap(make_env: MakeEnv, tasks: Tasks, *, timeout_s: float) -> Overlap | None:
    """Compare on a thread; None: there is nothing to compare, or the environment failed, which the run counts.

    Args:
        make_env: makes the environment.
        tasks: of the run.
        timeout_s: deadline of construction, and of each reset.
    """
    with EnvThread() as thread:
        try:
            return await thread.call(lambda: find_overlap(make_env, tasks), timeout_s=2 * timeout_s + _OVERLAP_LIMIT_S)
        except Exception:  # noqa: BLE001 - of a stranger's environment, which was tried before
            return None


def find_overlap(make_env: MakeEnv, tasks: Tasks) -> Overlap | None:
    """Compare evaluation tasks with the first training tasks, for at most a few seconds.

    None: the environment says itself which tasks are in which split (`num_tasks`).
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
    shown = repr((reply.messages, reply.gold_answer, reply.state_key))
    return hashlib.sha256(shown.encode(errors="backslashreplace")).digest()
