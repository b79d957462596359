"""Trial of an environment before a run begins to write: its description, and one episode of empty messages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentrl.chat import Renderer
from agentrl.env import EnvDescription, base_env, close_env, describe
from agentrl.errors import EnvironmentFailure, UserError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.conversation import Task
from agentrl.rollout.env_driver import EnvThread, MakeEnv
from agentrl.rollout.episode import Episode
from agentrl.rollout.faults import RaisedError
from agentrl.rollout.sample_action import EpisodeContext
from agentrl.rollout.tasks import Tasks
from agentrl.types import Completion, FinishReason, Sampling, Split, StopReason


class _SilentEngine:
    """A sampler that ends every turn at once."""

    @contextmanager
    def conversation(self, request_id: str) -> Iterator[None]:  # noqa: ARG002 - there is nothing to keep
        yield

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:  # noqa: ARG002
        stop = sampling.stop_token_ids[:1]
        return Completion(token_ids=stop, logprobs=(0.0,), versions=(0,), finish_reason=FinishReason.STOP)


async def describe_env(make_env: MakeEnv, *, timeout_s: float) -> EnvDescription:
    """Make the environment for the first time, under a deadline, and describe it.

    Raises:
        UserError: with the message of what went wrong.
    """

    def describe_made() -> EnvDescription:
        env = make_env()
        try:
            return describe(base_env(env))
        finally:
            close_env(env)

    with EnvThread() as thread:
        try:
            return await thread.call(describe_made, timeout_s=timeout_s)
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"environment: construction did not return within rollout.env_timeout_s: {timeout_s:g} s"
            ) from error
        except RaisedError as error:
            if isinstance(error.raised, UserError):
                raise error.raised from None
            raise EnvironmentFailure(
                f"environment: provides(), tools, num_tasks() or close() raised {error.line}"
            ) from error


async def try_environment(
    *, make_env: MakeEnv, renderer: Renderer, config: RolloutConfig, tasks: Tasks, fork: bool = False
) -> None:
    """Play one episode of empty messages, so that a broken environment is noticed before anything is written.

    With `fork`, rollouts are forked from it too.

    Raises:
        EnvironmentFailure: with the message of what went wrong.
        UserError: for what the recipe must change, such as a first prompt that fills the context.
    """
    split: Split = "eval" if tasks.num.train == 0 else "train"
    task = Task(group_id="trial", rollout_index=0, seed=tasks.seed, sampling_seed=tasks.seed, split=split, task_index=0)
    context = EpisodeContext(engine=_SilentEngine(), renderer=renderer, config=config)
    with EnvThread() as thread:
        trajectory = await Episode(task, context=context, thread=thread, fork=fork).play(make_env)
    if trajectory.failed and trajectory.stop_reason is not StopReason.UNSCORED:
        raise EnvironmentFailure(trajectory.error)
