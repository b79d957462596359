"""What `check_env` found out about an environment that keeps the contract."""

from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.env import EnvDescription, MessageEnv, describe
from agentrl.env.probing import bad_actions
from agentrl.rollout import Tasks
from agentrl.rollout.env_calls import MakeEnv
from agentrl.rollout.overlap import find_overlap
from agentrl.rollout.reset_proof import reset_proof
from agentrl.types import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEnv:
    """What was proven of an environment, and what was not."""

    name: str
    lines: tuple[str, ...]
    """Plain sentences, one fact each."""

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"- {line}" for line in self.lines)])


def look_at(name: str, make_env: MakeEnv, env: MessageEnv, *, num_seeds: int) -> CheckedEnv:
    """Look at what is no matter of right and wrong; the environment has passed all checks.

    Args:
        name: of the environment.
        make_env: makes one.
        env: one of them.
        num_seeds: how many were tried.
    """
    return CheckedEnv(name=name, lines=tuple(_lines(make_env, env, describe(env), num_seeds)))


def _lines(make_env: MakeEnv, env: MessageEnv, description: EnvDescription, num_seeds: int) -> Iterator[str]:
    yield f"a seed begins the same task again, and plays alike with the same actions ({num_seeds} seeds tried)"
    yield f"{len(list(bad_actions(description.tools)))} kinds of nonsense are answered with messages"
    yield f"copies by {'fork() and pickle play' if env.can_fork else 'pickle play'} like the original"
    has_oracle = type(env).oracle is not MessageEnv.oracle
    yield "the oracle ends each task that was tried" if has_oracle else "it has no oracle(), so warmup.steps must be 0"
    for need in sorted(description.needs):
        yield f"credit schemes may read {need.value}"
    if missing := sorted({Need.STATE_KEYS, Need.ANSWER_LOGPROBS, Need.BRANCHES} - description.needs):
        yield f"credit schemes may not read {', '.join(need.value for need in missing)}"
    tasks = Tasks(seed=0, num=description.num_tasks)
    yield from _about_splits(make_env, tasks)
    proof = reset_proof(make_env, tasks)
    if proof.flaw is None:
        yield "reset() forgets the episodes before it, so an environment plays many of them"
    else:
        yield f"each episode has an environment of its own: {proof.flaw}"
    if (words := proof.words(live=64)) is not None:
        yield words


def _about_splits(make_env: MakeEnv, tasks: Tasks) -> Iterator[str]:
    for split, num in zip(tasks.num._fields, tasks.num, strict=True):
        if num is not None:
            yield f"its {split} split has {num} tasks"
    found = find_overlap(make_env, tasks)
    if found is None:
        return
    told = found.words()
    if told is None:
        yield f"{found.num_shared} of {found.num_evaluation} evaluation tasks are among {found.num_training} training tasks"
    else:
        yield told
