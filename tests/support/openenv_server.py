"""A server of OpenEnv's own, for the Python that has it: `python openenv_server.py PORT`."""

import os
import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Guessing(Environment[Guess, Hint, State]):
    """Guess a number from 0 to 99."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.secret, self.num_steps = random.Random(seed).randrange(100), 0
        return Hint(hint="Guess a number from 0 to 99.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == 666:
            os._exit(1)
        self.num_steps += 1
        if action.number == self.secret:
            return Hint(hint="Right.", done=True, reward=1.0)
        return Hint(hint="higher" if action.number < self.secret else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
