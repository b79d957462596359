"""Runs built from recipes: other models, templates, credit and environments than the defaults."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import (
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import agentrl
from agentrl import MessageEnv
from agentrl.compare.curves import read_run
from agentrl.distributed.checkpoints import checkpoints
from agentrl.errors import ConfigError, EngineError, EnvironmentFailure, TrainingError, UserError
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder, Told
from agentrl.report.html.runs import by_recipe, open_runs
from agentrl.report.records import read_records
from agentrl.rollout import limits
from agentrl.run.build import build
from agentrl.run.export import export
from agentrl.testing import check_env
from tests.plugin.package.stranger.plain import PlainConfig
from tests.support.each import each
from tests.support.hugging_face import hugging_face_folder
from tests.support.processes import in_process
from tests.support.runs import SIZES, recipe, train

pytestmark = pytest.mark.process


class Mute(MessageEnv):
    """A one-turn task without demonstrations."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return ({"role": "user", "content": "Well?"},), {}

    def step(self, action: Any) -> Any:
        return (), 0.0, True, False, {}


class Lost(Mute):
    """Its oracle has a bug."""

    def oracle(self, **_: Any) -> Any:
        raise RuntimeError("lost the map")


def test_the_same_recipe_trains_a_hugging_face_model(tmp_path: Path) -> None:
    name = hugging_face_folder(tmp_path / "model", rewrites=False)
    folder, rows = train(recipe(tmp_path, model={"name_or_path": name}))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["first/ratio_deviation"] < 1e-4 for row in rows[1:])
    assert all(turn.extends for r in read_records(folder.rollouts()[0]) for turn in r.turns)


@pytest.mark.slow
def test_a_cold_start_on_a_file_of_dialogues_needs_no_oracle(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    said = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Well."}]
    file.write_text(json.dumps({"messages": said}) + "\n", encoding="utf-8")
    model = {"name_or_path": hugging_face_folder(tmp_path / "model", rewrites=False)}
    warmup = {"dialogues": str(file), "steps": 80, "learning_rate": 1e-2}
    folder, rows = train(recipe(tmp_path, model=model, env={"id": f"{__name__}:Mute"}, warmup=warmup))
    assert [row["step"] for row in rows] == [0, 1, 2]
    actions = [turn.message["content"] for r in read_records(folder.rollouts()[0]) for turn in r.turns]
    assert actions.count("Well.") >= 3


@pytest.mark.slow
@each("mode", ["sync", "partial", "async"])
def test_updates_of_a_mixture_take_the_experts_that_the_engine_chose(mode: str, tmp_path: Path) -> None:
    name = hugging_face_folder(tmp_path / "model", rewrites=False)
    sizes: dict[str, Any] = {
        "vocab_size": 261,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(name)
    settings = recipe(
        tmp_path,
        model={"name_or_path": name},
        loss={"routing_replay": "engine"},
        rollout={"mode": mode, "max_turns": 3},
    )
    folder, (_, first, second) = train(settings)
    assert (first["moe/replayed"], first["moe/unlike_engine"]) == (1, 0)
    assert second["moe/replayed"] == 1
    # What a kill leaves of episodes under way is without experts, which no file holds.
    resumed = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 6})})
    told = [row["moe/replayed"] for row in train(resumed, folder)[1] if row["step"] > 2]
    assert len(told) == 4
    assert told[-1] == 1
    assert mode != "partial" or told[0] < 1


def test_a_mixture_whose_layers_choose_differently_is_refused_where_the_engine_is_to_tell_experts(
    tmp_path: Path,
) -> None:
    name = hugging_face_folder(tmp_path / "model", rewrites=False)
    sizes: dict[str, Any] = {
        "vocab_size": 261,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 8,
        "moe_topk": [1, 2],
    }
    HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**sizes)).save_pretrained(name)
    settings = recipe(tmp_path, model={"name_or_path": name}, loss={"routing_replay": "engine"})
    with pytest.raises(ConfigError, match=r"^loss\.routing_replay: HunYuanMoEV1ForCausalLM chooses .*; set it to none"):
        train(settings)


@pytest.mark.slow
@each("precision", ["float32", "bfloat16"])
def test_a_run_of_adapters_resumes_and_is_exported_as_a_whole_model(precision: str, tmp_path: Path) -> None:
    in_process(partial(train_adapters, precision, tmp_path))  # accelerate's precision is that of a process


def train_adapters(precision: str, tmp_path: Path) -> None:
    base = hugging_face_folder(tmp_path / "model", rewrites=False)
    settings: dict[str, Any] = {
        "model": {"name_or_path": base, "lora": {"rank": 2}},
        "warmup": {"steps": 2, "num_demonstrations": 4},
        "loss": {"kl_coefficient": 0.1},
    }
    moved: list[str] = []
    to = PreTrainedModel.to

    def record(model: PreTrainedModel, device: torch.device, *dtype: torch.dtype) -> PreTrainedModel:
        moved.append(str(*dtype or (model.get_input_embeddings().weight.dtype,)))
        return cast("PreTrainedModel", to(model, device, *dtype))

    with (
        patch.object(PreTrainedModel, "to", record),
        build(recipe(tmp_path, **settings, train={"precision": precision})) as parts,
    ):
        assert set(moved) == {f"torch.{precision}"}  # no device has to hold more
        dtypes = {(weight.requires_grad, str(weight.dtype)) for weight in parts.policy.parameters()}
        assert dtypes == {(True, "torch.float32"), (False, f"torch.{precision}")}
        assert parts.policy.layout == "tree"
    folder, _ = train(recipe(tmp_path, **settings, train={"precision": precision}))
    assert not list(folder.path.rglob("model*.safetensors"))  # what is frozen is the base model's
    longer = recipe(tmp_path, **settings, train={"steps": 3, "precision": precision})
    _, rows = train(longer, folder)
    export(longer, folder, tmp_path / "exported")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    before, after = (load_file(path / "model.safetensors") for path in (Path(base), tmp_path / "exported"))
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_what_a_merge_in_half_precision_loses_is_asked_for_and_measured(tmp_path: Path) -> None:
    in_process(partial(merge_adapters, tmp_path))


def merge_adapters(tmp_path: Path) -> None:
    model: dict[str, Any] = {
        "name_or_path": hugging_face_folder(tmp_path / "model", rewrites=False),
        "lora": {"rank": 2},
    }
    given: dict[str, Any] = {
        "train": {"precision": "bfloat16", "learning_rate": 1e-4, "agreement": 0.2},
        "warmup": {"steps": 2, "num_demonstrations": 4, "learning_rate": 4e-6},  # so that adapters are something
    }
    with pytest.raises(
        ConfigError, match=r"^model\.lora: engine\.name: .* set model\.lora\.merge: true to accept the loss$"
    ):
        train(
            recipe(
                tmp_path / "refused",
                model=model,
                engine={"name": f"{PlainConfig.__module__}:PlainConfig"},
                **given,
            )
        )
    _, rows = train(recipe(tmp_path, model=model | {"lora": {"rank": 2, "merge": True}}, **given))
    assert all(0.3 < row["mismatch/lost_change"] < 1 for row in rows[1:]), rows
    _, rows = train(recipe(tmp_path / "kept", model=model, **given))
    assert not any("mismatch/lost_change" in row for row in rows)


@pytest.mark.slow
def test_one_process_alone_rounds_what_is_frozen_and_shares_it_with_the_reference_though_sharding_is_full(
    tmp_path: Path,
) -> None:
    in_process(partial(build_adapters_alone, tmp_path))


def build_adapters_alone(tmp_path: Path) -> None:
    base = hugging_face_folder(tmp_path / "model", rewrites=False)
    given = recipe(
        tmp_path,
        model={"name_or_path": base, "lora": {"rank": 2}},
        loss={"kl_coefficient": 0.1},
        train={"precision": "bfloat16", "sharding": "full"},
    )
    with build(given) as parts:
        reference = parts.learner.state.reference
        assert reference is not None
        for weight, kept in zip(parts.policy.parameters(), reference.parameters(), strict=True):
            assert weight.dtype == (torch.float32 if weight.requires_grad else torch.bfloat16)
            assert (weight is kept) == (not weight.requires_grad)


def test_a_template_that_rewrites_history_is_trained_turn_by_turn(tmp_path: Path) -> None:
    name = hugging_face_folder(tmp_path / "model", rewrites=True)
    folder, rows = train(recipe(tmp_path, model={"name_or_path": name}))
    later = [turn for path in folder.rollouts() for r in read_records(path) for turn in r.turns[1:]]
    assert not any(turn.extends for turn in later)
    # Every token is trained in the context in which it was sampled: on policy, the ratio is 1 there too.
    assert all(row["first/ratio_deviation"] < 1e-4 for row in rows[1:])


def test_a_scheme_the_environment_cannot_serve_is_refused_or_replaced(tmp_path: Path) -> None:
    outcome_only = {"options": {"turn_rewards": False}}
    with pytest.raises(ConfigError, match=r"'turn_return' needs turn_rewards.*would work: .*, gigpo, .*, uniform\."):
        train(recipe(tmp_path, env=outcome_only, credit={"scheme": "turn_return"}))
    settings = recipe(tmp_path, env=outcome_only, credit={"scheme": "turn_return", "fallback": "uniform"})
    with build(settings) as parts:
        assert any("falling back to uniform" in warning for warning in parts.warnings)
    _, rows = train(settings)
    assert [row["credit/fallback"] for row in rows[1:]] == [1.0, 1.0]


@each(
    ("sections", "words"),
    [
        ({"report": {"trackers": ["wandbb"]}}, r"report\.trackers: 'wandbb' is no tracker"),
        ({"rollout": {"max_context_tokens": 5000}}, r"max_context_tokens: 5000 exceeds the model's 4096 positions"),
        ({"credit": {"scheme": "turn_retrun"}}, r"Did you mean 'turn_return'"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_anything_is_written(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        train(recipe(tmp_path, **sections))
    assert not (tmp_path / "run").exists()


def test_the_learning_rate_of_zero_updates_nothing_and_stays_on_policy(tmp_path: Path) -> None:
    settings = recipe(tmp_path, train={"learning_rate": 1e-30, "num_minibatches": 4})
    _, rows = train(settings)
    for row in rows[1:]:
        assert row["ratio/spread"] < 1e-5
        assert row["clip/tokens"] == 0


def test_an_engine_that_disagrees_more_than_allowed_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"train\.agreement"):
        train(recipe(tmp_path, train={"agreement": 1e-12}))


def test_a_faulty_oracle_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=r"oracle\(\) raised RuntimeError: lost the map"):
        train(recipe(tmp_path, env={"id": "tests.test_run:Lost"}, warmup={"steps": 1}))
    with pytest.raises(ConfigError, match=r"has no oracle\(\)"):
        train(recipe(tmp_path, env={"id": "tests.test_run:Mute"}, warmup={"steps": 1}))


@pytest.mark.slow
def test_a_strangers_environment_trains_without_being_installed(tmp_path: Path) -> None:
    check_env("examples.custom_env:MyEnv")
    _, rows = train(recipe(tmp_path, env={"id": "examples.custom_env:MyEnv"}, warmup={"steps": 2, "skill": 0.5}))
    assert [row["step"] for row in rows] == [0, 1, 2]


def test_without_an_oracle_a_local_model_trains_without_warm_up_on_bytes(tmp_path: Path) -> None:
    with build(recipe(tmp_path, env={"id": "tests.test_run:Mute"})) as parts:
        assert len(parts.tokenizer) == 261
    _, rows = train(recipe(tmp_path, env={"id": "tests.test_run:Mute"}))
    assert [row["step"] for row in rows] == [0, 1, 2]


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate holds one precision for each process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_bfloat16_trains_with_its_own_bound_of_agreement(tmp_path: Path) -> None:
    _, rows = train(recipe(tmp_path, train={"precision": "bfloat16"}))
    assert all(1e-6 < row["first/engine_difference"] < 0.05 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_rounding_that_changes_the_experts_of_a_mixture_is_no_mismatch(tmp_path: Path) -> None:
    name = hugging_face_folder(tmp_path / "model", rewrites=False)
    sizes: dict[str, Any] = {
        "vocab_size": 261,
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 16,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "initializer_range": 0.4,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(name)
    settings = recipe(tmp_path, model={"name_or_path": name}, train={"precision": "bfloat16"})
    with build(settings) as parts:
        sync = parts.weight_sync
        found = sync.verify_and_push(0)
        assert 0.1 < found < sync.bound < 2  # six times the rounding of the trainer itself, on what this model samples
        for weight in parts.policy.parameters():
            weight.data = weight.data.roll(1, 0)
        with pytest.raises(EngineError, match=rf"train\.agreement: {sync.bound:g}"):
            sync.check_samples()
    with (
        build(settings.model_copy(update={"train": settings.train.model_copy(update={"agreement": 0.05})})) as parts,
        pytest.raises(EngineError, match=r"train\.agreement: 0\.05\."),  # what a recipe says is the bound
    ):
        parts.weight_sync.verify_and_push(0)


def test_more_processes_than_gpus_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")  # as launchers tell each process
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=r"^--processes: one for each GPU, of which this machine has 1; or set train\.dev"
    ):
        train(recipe(tmp_path, train={"device": "auto"}))


def test_a_kl_term_cannot_be_added_to_a_run_that_kept_no_reference(tmp_path: Path) -> None:
    folder, _ = train(recipe(tmp_path))
    before = folder.config_file.read_text()
    with pytest.raises(ConfigError, match=r"loss\.kl_coefficient: 0\.1 needs the policy with which"):
        train(recipe(tmp_path, loss={"kl_coefficient": 0.1}, train={"steps": 3}), folder)
    assert folder.config_file.read_text() == before  # what was refused leaves the run as it was


def test_a_model_of_other_sizes_cannot_resume_a_run(tmp_path: Path) -> None:
    folder, rows = train(recipe(tmp_path))
    before = folder.config_file.read_text()
    other = {"local": {**SIZES, "intermediate_size": 64}}
    with pytest.raises(ConfigError, match="does not fit this recipe"):
        train(recipe(tmp_path, model=other, train={"steps": 3}), folder)
    assert (folder.config_file.read_text(), folder.metrics()) == (before, rows)


@pytest.mark.slow
@each("name", ["model.safetensors", "optimizer.pt", "agentrl.json", "learner-0.json", "files.json"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(name: str, tmp_path: Path) -> None:
    folder, _ = train(recipe(tmp_path))
    newest = checkpoints(folder.checkpoints)[-1]
    content = (newest / name).read_bytes()
    (newest / name).write_bytes(content[: len(content) // 2] if name == "optimizer.pt" else b"[]")
    (folder.checkpoints / "step-000004-backup").mkdir()  # of the user: no checkpoint
    (folder.checkpoints / "step-000009").write_text("notes")
    with pytest.raises(
        ConfigError, match=rf"{newest} is damaged .*{name}.*delete it, and the run resumes from step-000001"
    ):
        train(recipe(tmp_path, train={"steps": 3}), folder)


def test_rows_of_metrics_are_never_dropped_for_a_line_that_is_broken(tmp_path: Path) -> None:
    folder, rows = train(recipe(tmp_path))
    file = folder.path / "metrics.jsonl"
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, "garbage", *others]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2: .*mend that line, or delete it"):
        train(recipe(tmp_path, train={"steps": 3}), folder)
    assert len(file.read_text().splitlines()) == len(rows) + 1
    file.write_text("\n".join([first, *others, '{"step": 7, "re']))  # as a kill leaves it
    assert folder.metrics() == rows


@pytest.mark.slow
@each("damage", ["metrics", "a folder for metrics", "warnings", "a folder for rollouts", "reference"])
def test_what_cannot_be_read_is_told_before_anything_is_written(damage: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rollout": {"mode": "partial"},
        "loss": {"unit": "version", "anchor": "behavior", "kl_coefficient": 0.1},
    }
    folder, _ = train(recipe(tmp_path, **settings))
    metrics, weights = folder.path / "metrics.jsonl", folder.reference / "model.safetensors"
    if damage == "reference":
        data = bytearray(weights.read_bytes())
        data[10:14] = b"\xff\xfe\xff\xfe"  # within the header, whose size stays
        weights.write_bytes(data)
    elif damage == "warnings":
        (folder.path / "warnings.jsonl").write_text("[1]\n")
    elif damage == "a folder for rollouts":
        (folder.path / "rollouts" / "step-000009.jsonl").mkdir(parents=True)
    else:
        metrics.unlink()
        metrics.mkdir() if damage == "a folder for metrics" else metrics.write_text("[1]\n")
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    words = "the policy with which this run began" if damage == "reference" else damage.removeprefix("a folder for ")
    with pytest.raises(ConfigError, match=words):
        train(recipe(tmp_path, **settings, train={"steps": 3}), folder)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_a_run_that_has_lost_its_checkpoints_is_not_restarted_in_silence(tmp_path: Path) -> None:
    folder, rows = train(recipe(tmp_path))
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(
        ConfigError, match=r"metrics up to step 2, but no checkpoint to resume from; begin another run: agentrl train"
    ):
        train(recipe(tmp_path, train={"steps": 3}), folder)
    assert folder.metrics() == rows


@pytest.mark.slow
def test_a_run_that_learns_nothing_says_so_once_and_ends_where_the_recipe_wants_it(tmp_path: Path) -> None:
    told: list[str] = []

    def go(folder: RunFolder | None, **others: Any) -> RunFolder:
        settings = {"steps": 10, "checkpoint_every": 3, "stop_on": ["zero_spread"], **others}
        mute = recipe(tmp_path, env={"id": "tests.test_run:Mute"}, rollout={"max_turn_tokens": 200}, train=settings)
        return train(mute, folder, on_warning=told.append)[0]

    with pytest.raises(
        TrainingError, match=r"^step 8, train\.stop_on: zero_spread: nothing was learned in 8 steps"
    ) as caught:
        go(None)
    assert not [words for words in told if "nothing was learned" in words]  # the error says it
    folder = RunFolder(tmp_path / "run")
    assert f"agentrl train {folder.path} --train.stop_on '[]'" in str(caught.value)
    assert [row["health/zero_spread"] for row in folder.metrics()[1:]] == [0.0] * 7 + [1.0]
    assert checkpoints(folder.checkpoints)[-1].name == "step-000006"
    told.clear()
    rows = go(folder, stop_on=[]).metrics()
    assert [row["step"] for row in rows] == list(range(11))
    assert [words for words in told if "nothing was learned" in words] == told[:1]  # step 8 was done again
    found = [(warning.step, warning.name) for warning in folder.warnings()]
    assert found == [(0, "shared_tasks"), (8, "zero_spread")]  # the key is in one of three boxes


class Fallen(Mute):
    """Pays by chance, but for a time in which nothing is earned: by the number of episodes that ended in the process."""

    num_ended = 0
    pays_nothing: tuple[int, int] = (0, 0)

    def step(self, action: Any) -> Any:
        type(self).num_ended += 1
        (first, last), number = self.pays_nothing, self.num_ended
        return (), float(number % 2 and not first <= number <= last), True, False, {}


def fallen(tmp_path: Path, *, until: int, **settings: Any) -> Recipe:
    """A run of 14 steps of 16 episodes, whose reward falls in about the seventh."""
    Fallen.num_ended, Fallen.pays_nothing = 0, (80, until)
    train = {"steps": 14, "checkpoint_every": 2, "keep_last": 9, "learning_rate": 1e-3, **settings}
    rollout = {"num_groups": 4, "group_size": 4, "max_turn_tokens": 200, "max_context_tokens": 512}
    return recipe(tmp_path, env={"id": "tests.test_run:Fallen"}, rollout=rollout, train=train, evaluation={"every": 0})


@pytest.mark.slow
def test_a_run_whose_policy_collapsed_goes_back_once_with_half_the_rate(tmp_path: Path) -> None:
    agentrl.train(fallen(tmp_path, until=122, on_collapse="rewind"))
    folder = RunFolder(tmp_path / "run")
    ((collapsed, back),) = [
        (int(found[1]), int(found[2]))
        for warning in folder.warnings()
        if warning.name == "rewind"
        and (
            found := re.match(
                r"step (\d+): the policy has collapsed: .* back to step (\d+), .* 0\.0005$", warning.words
            )
        )
    ]
    assert back == (collapsed - 5) // 2 * 2 > 0  # the newest from before the steps that showed it
    rows = folder.metrics()
    assert [row["step"] for row in rows] == list(range(15))
    assert [row["learning_rate"] for row in rows[1:]] == [1e-3] * back + [5e-4] * (14 - back)
    assert load_recipe(folder.config_file).train.on_collapse == "stop"
    agentrl.train(fallen(tmp_path, until=0, on_collapse="rewind"), run_dir=tmp_path / "other", seed=1)
    folders = [tmp_path / "run", tmp_path / "other"]
    assert len({read_run(path).identity for path in folders}) == 1  # it began with the same recipe
    assert len(by_recipe(open_runs(folders))) == 1


@pytest.mark.slow
def test_a_second_collapse_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"^step \d+, train\.on_collapse: stop: the policy has collapsed") as caught:
        agentrl.train(fallen(tmp_path, until=9999, on_collapse="rewind"))
    assert str(caught.value).endswith(f"agentrl train {tmp_path / 'run'} --train.on_collapse warn")
    ((warning),) = [w for w in RunFolder(tmp_path / "run").warnings() if w.name == "rewind"]
    assert "half the learning rate, 0.0005" in warning.words


@pytest.mark.slow
def test_without_an_earlier_checkpoint_a_collapse_ends_the_run(tmp_path: Path) -> None:
    agentrl.train(fallen(tmp_path, until=9999, steps=9, checkpoint_every=1, keep_last=1))
    resumed = ["--train.steps", "14", "--train.on_collapse", "rewind", "--train.keep_last", "9"]
    with pytest.raises(TrainingError, match=r"No checkpoint from before is left.*train\.keep_last"):
        agentrl.train(tmp_path / "run", overrides=resumed)


@each(("every", "last", "is_kept"), [(1, 4, False), (1, 5, True), (2, 3, True), (20, 1, False)])
def test_going_back_is_refused_where_no_earlier_checkpoint_would_be_kept(
    every: int, last: int, *, is_kept: bool
) -> None:
    given = {"train": {"on_collapse": "rewind", "checkpoint_every": every, "keep_last": last}}
    if is_kept:
        load_recipe(given)
        return
    with pytest.raises(ConfigError) as caught:
        load_recipe(given)
    assert str(caught.value) == (
        f"train.on_collapse: rewind takes a checkpoint from 5 steps before, and checkpoint_every: {every} with keep_last: "
        f"{last} may keep none; raise one of them until checkpoint_every * (keep_last - 1) is at least 4"
    )


def test_stale_rollouts_ask_for_checkpoints_of_longer_ago() -> None:
    train = {"on_collapse": "rewind", "checkpoint_every": 1, "keep_last": 7}
    load_recipe({"train": train, "rollout": {"mode": "partial", "max_staleness": 2}})
    with pytest.raises(ConfigError, match=r"from 8 steps before, .* is at least 7$"):
        load_recipe({"train": train, "rollout": {"mode": "partial", "max_staleness": 3}})


@pytest.mark.slow
def test_demonstrations_that_the_limits_cut_off_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    settings = recipe(
        tmp_path,
        rollout={"max_turns": 12, "max_turn_tokens": 4},
        warmup={"steps": 2, "num_demonstrations": 4},
        train={"steps": 1},
    )
    folder, rows = train(settings, on_warning=told.append)
    words = (
        "demonstrations are cut off, 100% by rollout.max_turn_tokens: the policy is shown what it cannot play; raise it"
    )
    assert words in told
    assert Told(step=0, name="demonstrations_cut_off", words=words) in folder.warnings()
    assert rows[0]["health/demonstrations_cut_off"] == 1.0


def test_limits_of_the_system_are_told_as_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_raise_open_files", lambda: 10)
    with build(recipe(tmp_path)) as parts:
        assert any("open files, and this process may open 10; raise that limit" in words for words in parts.warnings)


def test_a_first_prompt_that_fills_the_context_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    settings = recipe(tmp_path, rollout={"max_context_tokens": 20, "max_turn_tokens": 4})
    with pytest.raises(UserError, match=r"^rollout\.max_context_tokens: 20 leaves no room after the first prompt of "):
        train(settings)
    assert not (tmp_path / "run").exists()


def test_an_oracle_that_cannot_end_within_the_limits_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    folder, rows = train(recipe(tmp_path, rollout={"max_turns": 2}, train={"steps": 1}), on_warning=told.append)
    words = "the environment's oracle() ends no episode within rollout.max_turns: 2; raise it"
    assert words in told
    assert Told(step=0, name="oracle_ends", words=words) in folder.warnings()
    assert rows[0]["health/oracle_ends"] == 0.0


@pytest.mark.slow
@each(
    ("rollout", "credit", "words"),
    [
        (
            {"group_rewards": [{"reward": "shorter"}]},
            {"scheme": "tree"},
            "group_rewards: 'tree' compares with what forks",
        ),
        ({"group_rewards": [{"reward": "shorter"}]}, {"scheme": "distill", "teacher": "hindsight"}, "reads no rewards"),
        (
            {"dynamic_sampling": 2},
            {"scheme": "turn_gae"},
            "dynamic_sampling: leaves out groups whose episodes earned alike",
        ),
    ],
)
def test_what_a_scheme_and_the_rollouts_would_spoil_is_not_trained_but_read(
    rollout: dict[str, Any], credit: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = recipe(tmp_path, rollout=rollout, credit=credit)  # as of a run that was trained so
    with build(given):  # to be evaluated or served
        pass
    with pytest.raises(ConfigError, match=words):
        train(given)
