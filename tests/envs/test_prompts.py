"""Option `prompt` of environments: its full form in the built-in ones, and its default by the model of a recipe."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import Prompt, ToolEnv
from agentrl.env import MessageEnv
from agentrl.errors import ConfigError
from agentrl.recipe.config import load_recipe
from agentrl.rollout.endpoint import Playing
from agentrl.testing import check_env
from agentrl.types import Message
from tests.envs.test_built_in import NAMES, skip_if_its_sandbox_is_missing
from tests.support.built_in import built_in, make
from tests.support.each import each


class Asking(ToolEnv):
    """An environment of a user, with the option."""

    def __init__(self, *, prompt: Prompt = "short") -> None:
        super().__init__()
        self.prompt = prompt

    def start(self, options: dict[str, Any]) -> str:
        return self.prompt

    def answer(self, text: str) -> None:
        self.finish(success=True)


class Worded(Asking):
    """An option of the same name that means something else."""

    def __init__(self, *, prompt: str = "Solve this:") -> None:
        super().__init__()
        self.prompt = prompt  # type: ignore[assignment]


def opening(env: MessageEnv) -> list[Message]:
    messages = list(env.reset(seed=1)[0])
    env.close()
    return messages


@each("name", NAMES)
def test_the_full_form_adds_a_system_message_that_names_every_tool_and_the_end(name: str) -> None:
    skip_if_its_sandbox_is_missing(name)
    env = make(name, {"prompt": "full"})
    *_, short_user = opening(make(name, {}))
    system, user = opening(env)
    assert (user, system["role"]) == (short_user, "system")
    assert "earn" in system["content"]
    assert "end" in system["content"]
    assert "  " not in system["content"]
    if name not in ("service_desk", "customer_service"):  # many tools, each of which its own schema explains
        assert all(tool["function"]["name"] in system["content"] for tool in env.tools)


@each("name", NAMES)
def test_the_full_form_names_no_reward_that_is_switched_off(name: str) -> None:
    skip_if_its_sandbox_is_missing(name)
    paid, unpaid = (opening(make(name, {"prompt": "full", "turn_rewards": on}))[0]["content"] for on in (True, False))
    assert paid != unpaid
    if name != "service_desk":  # which pays the same at the end
        assert unpaid.count("earns") + unpaid.count("earn ") < paid.count("earns") + paid.count("earn ")


@pytest.mark.slow
@pytest.mark.process
@each("name", NAMES)
def test_the_full_form_keeps_the_contract(name: str) -> None:
    skip_if_its_sandbox_is_missing(name)
    check_env(built_in()[name], seeds=range(2), prompt="full")


@each("name", NAMES)
def test_another_form_is_refused(name: str) -> None:
    skip_if_its_sandbox_is_missing(name)
    with pytest.raises(ConfigError, match="prompt: give short or full, got 'long'"):
        make(name, {"prompt": "long"})


PRETRAINED = {"model": {"name_or_path": "owner/model"}}


@each(
    ("env", "filled"),
    [
        ({"id": "calculator"}, {"prompt": "full"}),
        ({"id": "calculator", "options": {"num_operations": 3}}, {"num_operations": 3, "prompt": "full"}),
        ({"id": "calculator", "options": {"prompt": "short"}}, {"prompt": "short"}),
        ({"id": "agentrl/KeyDoor-v0"}, {"prompt": "full"}),
        ({"id": f"{__name__}:Asking"}, {"prompt": "full"}),
        ({"id": f"{__name__}:Worded"}, {}),
        ({"id": "tasks", "options": {"prompt": "question"}}, {"prompt": "question"}),
        ({"id": "tasks"}, {}),
        ({"id": "not_there:Nothing"}, {}),
    ],
)
def test_a_pretrained_model_gets_the_full_form_where_the_recipe_leaves_it_open(
    env: dict[str, Any], filled: dict[str, Any]
) -> None:
    recipe = load_recipe({**PRETRAINED, "env": env, "evaluation": {"env": {"other": env}}})
    assert recipe.env.options == recipe.evaluation.env["other"].options == filled
    played = Playing.read({"env": env, "evaluation": {"env": env}})  # by a model behind an endpoint
    assert played.env.options == played.evaluation.env[""].options == filled
    local = load_recipe({"env": env})
    assert local.env.options == env.get("options", {})


def test_the_form_is_recorded_and_read_again(tmp_path: Path) -> None:
    recipe = load_recipe({**PRETRAINED, "env": {"id": "key_door"}})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")), encoding="utf-8")
    assert load_recipe(file) == recipe
    assert load_recipe(file, ["--env.options.prompt", "short"]).env.options == {"prompt": "short"}
    (opened, _), _ = recipe.env.make().reset(seed=0)
    assert opened["role"] == "system"
