"""Fields of the recipe that may change when a run is resumed."""

from typing import Annotated

from pydantic import BaseModel

from agentrl.recipe.config import Recipe
from agentrl.recipe.plugin import MayChange, fixed, marked
from tests.support.each import each

MARKED = {
    *("deployment", "train.offload", "run_dir", "engine", "evaluation", "report", "model.lora.merge"),
    *(
        "agent.processes",
        "agent.timeout_s",
        "agent.heartbeat_s",
        "agent.host",
        "agent.port",
        "agent.public_host",
        "env.servers",
    ),
    *("rollout.max_live_episodes", "rollout.env_timeout_s", "rollout.engine_timeout_s", "rollout.max_retries"),
    *("rollout.max_consecutive_failures", "signals.judge_timeout_s", "signals.judge_retries", "signals.judge_threads"),
    *(
        "train.steps",
        "train.checkpoint_every",
        "train.keep_last",
        "train.agreement",
        "train.on_collapse",
        "train.stop_on",
        "train.layout",
    ),
    *("train.max_tokens_per_micro_batch", "train.process_timeout_s", "train.gradient_checkpointing", "train.compile"),
    "train.bfloat16_copy",
}


def test_the_fields_that_may_change_are_these() -> None:
    assert set(marked(Recipe)) == MARKED


@each(("schedule", "is_fixed"), [("constant", False), ("cosine", True)])
def test_the_number_of_steps_is_fixed_where_the_schedule_ends_with_them(schedule: str, is_fixed: bool) -> None:
    recipe = Recipe.model_validate({"train": {"schedule": schedule}})
    assert ("steps" in fixed(recipe)["train"]) is is_fixed


class Inner(BaseModel):
    kept: float = 1.0
    bound: Annotated[float, MayChange()] = 2.0


class Outer(BaseModel):
    inner: Inner = Inner()
    free: Annotated[Inner, MayChange()] = Inner()


def test_a_mark_holds_for_a_field_or_for_a_whole_section() -> None:
    assert fixed(Outer()) == {"inner": {"kept": 1.0}}
    assert set(marked(Outer)) == {"inner.bound", "free"}
