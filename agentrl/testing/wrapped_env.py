"""Whether what is put around an environment lets it be played."""

from collections.abc import Callable
from functools import partial

from agentrl.env import as_message
from agentrl.rollout.env_calls import reset, step
from agentrl.rollout.tasks import EnvTask
from agentrl.testing.env_session import Session

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
