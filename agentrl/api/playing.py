"""One episode, played by a model or by whatever stands behind an OpenAI-compatible endpoint."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.api.evaluation import evaluated, evaluated_at_endpoint, to_play_at_endpoint
from agentrl.api.target import load_to_play, look_for_modules_here, sections, without_running_loop
from agentrl.data.files import keep_process
from agentrl.data.plain import printable
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.report.records import calls_of
from agentrl.report.terminal import Console
from agentrl.rollout.endpoint import ChatModel
from agentrl.rollout.evaluation import Evaluation
from agentrl.types import Message, StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode."""

    messages: list[Message]
    """The dialogue, actions among it."""
    rewards: list[float]
    """Reward of each turn."""
    is_over: bool
    """False if the limit of turns ended it."""
    success: bool
    """Whether the environment said so at the end."""
    score: float
    """From 0 to 1; 0 if the environment gave none."""
    is_scored: bool = True
    """False if nothing could score it: the last reward, given as 0, is none."""

    def __str__(self) -> str:
        """Write the dialogue out, a message a line."""
        lines = [
            f"{m['role']}: {' '.join(filter(None, [str(m.get('content') or ''), *calls_of(m)]))}" for m in self.messages
        ]
        end = (
            f"reward {sum(self.rewards):g}, success {self.success}, score {self.score:g}"
            if self.is_scored
            else "no score"
        )
        return "\n".join([*map(printable, lines), f"[{end}, {len(self.rewards)} turns]"])


@keep_process()
def play(
    env: Any = None,
    model: str | os.PathLike[str] | None = None,
    *,
    endpoint: str | None = None,
    seed: int = 0,
    max_turns: int = 16,
    temperature: float = 1.0,
    api_key_env: str = "OPENAI_API_KEY",
) -> Played:
    """Let a model play one evaluation task; print what is returned to read the dialogue.

    Args:
        env: a class, a function that returns an environment, a name, or a section `env`. None: that of the run.
        model: a run or its folder, or the name or folder of a Hugging Face model; with `endpoint`, its name there.
        endpoint: of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`.
        seed: which task.
        max_turns: the episode ends after so many.
        temperature: of sampling.
        api_key_env: environment variable that holds the endpoint's key; it need not be set where none is asked for.

    Raises:
        UserError: for what cannot be carried out.
        EnvironmentFailure: if the endpoint does not answer, or the environment fails.
    """
    look_for_modules_here(model)
    if endpoint is None:
        return _played_here(env, model, seed=seed, max_turns=max_turns, temperature=temperature)
    if env is None or not isinstance(model, str):
        raise ConfigError("play: with an endpoint, name an environment, and the model as the endpoint knows it")
    playing = to_play_at_endpoint(
        None, changes=sections({"env": env, "rollout": {"max_turns": max_turns}, "evaluation": _one(seed, temperature)})
    )
    served = ChatModel(url=endpoint, name=model, api_key_env=api_key_env)
    with without_running_loop():
        return _first(evaluated_at_endpoint(playing, served, console=Console(soft_wrap=True), first=seed))


def _one(seed: int, temperature: float) -> dict[str, Any]:
    """Return the section `evaluation` of one episode."""
    return {"num_tasks": 1, "seed": seed, "samples": 1, "pass_at": [1], "temperature": temperature}


def _played_here(
    env: Any, model: str | os.PathLike[str] | None, *, seed: int, max_turns: int, temperature: float
) -> Played:
    is_run = model is not None and (Path(model) / "config.yaml").is_file()
    changes = {
        "env": env,
        "model": None if is_run else model,
        "seed": seed,
        "rollout": {"max_turns": max_turns},
        "evaluation": _one(seed, temperature),
    }
    recipe, run_dir = load_to_play(model if is_run else None, changes=sections(changes))
    with without_running_loop():
        found, _ = evaluated(recipe, run_dir, console=Console(soft_wrap=True), keep=False, first=seed)
    return _first(found)


def _first(found: dict[str, Evaluation]) -> Played:
    trajectory: Trajectory = next(iter(found.values())).groups[0].trajectories[0]
    is_scored = trajectory.stop_reason is not StopReason.UNSCORED
    if is_scored and trajectory.error is not None:
        raise EnvironmentFailure(trajectory.error)
    return Played(
        messages=[message for turn in trajectory.turns for message in (*turn.observation, turn.message)],
        rewards=[turn.reward for turn in trajectory.turns],
        is_over=not trajectory.truncated,
        success=bool(trajectory.reported("success")),
        score=trajectory.reported("score") or 0.0,
        is_scored=is_scored,
    )
