"""Small recipes, and runs of them in this process."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import Credit, CreditScheme, Trajectory, TrajectoryGroup
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.rollout import derive_seed
from agentrl.run import loop
from agentrl.run.build import Parts, build

SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
NOISE: dict[str, dict[str, Any]] = {
    "env": {"id": "key_door"},
    "model": {"local": SIZES},
    "engine": {"max_batch_size": 8},
    "rollout": {
        "num_groups": 3,
        "group_size": 4,
        "max_turns": 3,
        "max_turn_tokens": 8,
        "max_episode_tokens": 24,
        "max_context_tokens": 512,
    },
    "credit": {"scheme": "tests.support.runs:Noise"},
    "train": {"device": "cpu", "learning_rate": 1e-2},
}


def recipe(tmp_path: Path, **sections: Any) -> Recipe:
    """Two steps of `key_door` on a tiny model, with other fields where they are given."""
    given: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "env": {"id": "key_door"},
        "model": {"local": SIZES},
        "rollout": {
            "num_groups": 2,
            "group_size": 2,
            "max_turns": 4,
            "max_turn_tokens": 12,
            "max_context_tokens": 1024,
        },
        "train": {"steps": 2, "num_minibatches": 2, "learning_rate": 3e-4, "device": "cpu", "checkpoint_every": 1},
        "evaluation": {"num_tasks": 2},
        "report": {"rollouts_every": 1},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section} if isinstance(section, dict) else section
    return Recipe.model_validate(given)


def train(
    settings: Recipe,
    folder: RunFolder | None = None,
    *,
    on_progress: Callable[..., None] = lambda *_: None,
    on_warning: Callable[[str], object] = lambda _: None,
) -> tuple[RunFolder, list[dict[str, float]]]:
    """Train a recipe, or resume the run of a folder with it."""
    tokenizer = None if folder is None else folder.tokenizer
    with build(settings, tokenizer_folder=tokenizer, on_warning=on_warning) as parts:
        return loop.train(parts, folder, on_progress=on_progress)


class Noise(CreditScheme):
    """Advantages that differ from token to token and follow from the ids alone: a random policy earns no rewards."""

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [[self._credit(trajectory) for trajectory in group.trajectories] for group in groups]

    def _credit(self, trajectory: Trajectory) -> Credit:
        rng = np.random.default_rng(derive_seed(trajectory.trajectory_id))
        return Credit.from_tokens(trajectory, rng.normal(size=trajectory.num_action_tokens))


class Steps:
    """The steps of a run that has no folder, one at a time."""

    def __init__(self, parts: Parts, *, finished: int = 0) -> None:
        self.parts, self.finished = parts, finished
        parts.weight_sync.verify_and_push(finished)

    def step(self) -> loop.StepResult:
        self.finished += 1
        return loop.train_step(self.parts, self.finished)


class Runs:
    """Parts of small runs on noise, closed together."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stack, self._monkeypatch = stack, monkeypatch

    def build(
        self,
        *,
        engine_class: type[TransformersEngine] = TransformersEngine,
        run_dir: Path | None = None,
        **sections: Any,
    ) -> Parts:
        """Build a run of `NOISE`, with other fields where they are given, and perhaps an engine that misbehaves."""
        given: dict[str, Any] = {"seed": 1, "run_dir": run_dir}
        given |= {name: {**NOISE.get(name, {}), **sections.get(name, {})} for name in NOISE.keys() | sections.keys()}
        with self._monkeypatch.context() as patch:
            patch.setattr("agentrl.engine.transformers.engine.TransformersEngine", engine_class)
            return self._stack.enter_context(build(Recipe.model_validate(given)))

    def begin(self, **given: Any) -> Steps:
        return Steps(self.build(**given))
