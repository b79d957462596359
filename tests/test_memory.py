"""`agentrl plan`: what it counts against what models hold, and what it says of recipes."""

import re
import sys
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from torch import Tensor
from transformers import Qwen3Config

from agentrl.cli import main
from agentrl.errors import ConfigError
from agentrl.learn.line_search import KeptVersions
from agentrl.policy.config import LoraSettings
from agentrl.policy.layout import hidden_states, lay_out
from agentrl.policy.lora import add_lora
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.run.doctor import changed, cheapest_fit, remedies
from agentrl.run.memory import GB, Kept, ProcessMemory, count_kept, count_weights, model_sizes, plan_memory
from tests.support.architectures import ARCHITECTURES, tiny_model
from tests.support.each import each
from tests.support.plan_memory import CASES, planned_and_measured
from tests.support.processes import Command
from tests.support.qwen3 import folder_of

_LOCAL = ["--engine.name", "transformers", "--model.local.vocab_size", "4096"]
EXAMPLES = Path(__file__).parents[1] / "examples" / "gpu"


@pytest.mark.slow
@pytest.mark.process
@each("name", ARCHITECTURES)
@each("lora", [None, LoraSettings(rank=2, target_modules=("q_proj",))])
def test_weights_are_counted_as_a_model_has_them(name: str, lora: LoraSettings | None) -> None:
    if name == "Phi-3":
        lora = None  # its queries have no layer of their own
    model = tiny_model(name, vocab_size=97)
    counted = count_weights(model.config, lora)
    if lora is not None:
        add_lora(model, lora)
        assert counted.trained == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert counted.total == sum({id(p): p.numel() for p in model.parameters()}.values())
    assert 0 < counted.layer < counted.total


@pytest.mark.slow
@pytest.mark.process
@each("name", ARCHITECTURES)
def test_keys_and_values_are_those_of_the_layers_that_have_them(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, vocab_size=97).eval()
    with torch.no_grad():
        layers = model(torch.arange(3, 13)[None], use_cache=True).past_key_values.layers
    kept = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
    model.config.save_pretrained(tmp_path)
    options = ("--engine.max_batch_size", "3", "--rollout.max_context_tokens", "512")
    (process,) = plan_memory(load_recipe(None, ["--model.name_or_path", str(tmp_path), *options]), gpus=1, memory=0)
    num_bytes = sum(4 * tensor.numel() for tensor in kept if tensor is not None)
    assert process.uses["keys and values"] / (3 * 512) == num_bytes / 10 > 0


@pytest.mark.slow
@each("family", ["GPT2", "DeepseekV3"])
def test_keys_and_values_are_counted_where_configurations_name_them_otherwise(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    if family == "DeepseekV3":
        heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 8, "kv_lora_rank": 10}
        experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, **heads, **experts}
    config = getattr(transformers, f"{family}Config")(vocab_size=97, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        layers = model(torch.arange(3, 13)[None], use_cache=True).past_key_values.layers
    num_bytes = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in layers)
    config.save_pretrained(tmp_path)
    options = ("--engine.max_batch_size", "3", "--rollout.max_context_tokens", "64", "--rollout.max_turn_tokens", "32")
    recipe = load_recipe(None, ["--model.name_or_path", str(tmp_path), *options])
    (process,) = plan_memory(recipe, gpus=1, memory=0)
    assert process.uses["keys and values"] / (3 * 64) == num_bytes / 10 > 0


def test_what_a_run_would_refuse_is_refused_by_its_plan() -> None:
    def plan(*options: str, gpus: int = 1) -> dict[str, int]:
        return dict(plan_memory(load_recipe(None, options), gpus=gpus, memory=80 * GB)[0].uses)

    with pytest.raises(ConfigError, match=r"tensor_parallel_size: each of 2 .* set engine\.name: vllm_server"):
        plan("--engine.name", "vllm", "--engine.vllm", "{tensor_parallel_size: 2}", gpus=2)
    with pytest.raises(
        ConfigError, match=r"engine\.vllm\.gpu_memory_utilization: expected a number above 0, got 'high'"
    ):
        plan("--engine.name", "vllm", "--engine.vllm", '{"gpu_memory_utilization": "high"}')


def test_vllm_is_counted_where_it_is_going_to_sample(tmp_path: Path) -> None:
    tiny_model("gpt-oss", vocab_size=97).config.save_pretrained(tmp_path)
    model = ("--model.name_or_path", str(tmp_path))
    (process,) = plan_memory(load_recipe(None, model), gpus=1, memory=80 * GB)
    assert "vLLM" not in process.uses
    assert process.uses["engine"] > 0
    with pytest.raises(ConfigError, match=r"set engine\.name: transformers"):
        plan_memory(load_recipe(None, [*model, "--engine.name", "vllm"]), gpus=1, memory=80 * GB)


def test_groups_that_cannot_be_dealt_out_are_refused_by_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "calculator", "--gpus", "4", "--rollout.num_groups", "6"])
    assert "6 cannot be dealt out to 4 processes" in " ".join(capsys.readouterr().err.split())


def test_each_rank_has_memory_for_its_own_vllm() -> None:
    options = ("--engine.name", "vllm", "--rollout.num_groups", "8", "--rollout.group_size", "6")
    (one,), (two,) = (plan_memory(load_recipe(None, options), gpus=gpus, memory=80 * GB) for gpus in (1, 2))
    assert two.count == 2
    assert one.uses["vLLM"] == two.uses["vLLM"] == 0.4 * 80 * GB
    assert one.cached_tokens == two.cached_tokens
    assert (one.live, two.live) == (48, 24)
    (auto,) = plan_memory(load_recipe(None, options[2:]), gpus=2, memory=80 * GB)  # which takes the other engine
    assert "vLLM" not in auto.uses


@pytest.mark.slow
@pytest.mark.process
def test_a_model_without_attention_has_room_for_any_number_of_tokens(tmp_path: Path) -> None:
    config = tiny_model("Qwen3.5", vocab_size=97).config
    config.layer_types = ["linear_attention"] * len(config.layer_types)
    config.save_pretrained(tmp_path)
    recipe = load_recipe(None, ["--model.name_or_path", str(tmp_path), "--engine.name", "vllm"])
    (process,) = plan_memory(recipe, gpus=1, memory=80 * GB)
    assert process.uses["vLLM"] > 0
    assert process.cached_tokens is None


@pytest.mark.slow
@each("checkpointing", [False, True])
@each("name", ["Qwen3", "Llama", "Mistral", "GLM-4 MoE"])
def test_what_a_pass_keeps_is_counted(name: str, checkpointing: bool) -> None:
    dtype = torch.bfloat16 if "MoE" in name else torch.float32  # of a mixture in float32 the count is a guess
    model = tiny_model(name, vocab_size=97).train().to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in own:
            kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    inputs, _ = lay_out([np.arange(64)], "padded")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(hidden_states(model, inputs))
    measured = sum(size for size, _ in kept.values())
    counted = count_kept(model.config, None, num_tokens=64, weights=dtype, autocast=False, checkpointing=checkpointing)
    assert counted.rest + counted.layer * model.config.num_hidden_layers == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@each("num_tokens", [512, 709])
def test_what_a_long_pass_of_linear_attention_keeps_follows_from_short_ones(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_model("Qwen3.5", vocab_size=97).config

    def counted() -> Kept:
        options: dict[str, Any] = {"weights": torch.float32, "autocast": True, "checkpointing": False}
        return count_kept(config, None, num_tokens=num_tokens, **options)

    short = counted()
    monkeypatch.setattr("agentrl.run.memory._CHUNK", 10**6)  # no pass is long
    assert short == counted()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("how", ["vocabulary checkpointing", "vocabulary fsdp checkpointing"])
def test_what_updates_take_with_a_large_vocabulary_is_counted(how: str) -> None:
    (case,) = (case for case in CASES if case.how == how and case.vocab_size == 32768)
    planned, measured = planned_and_measured(case)
    assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
@pytest.mark.process
def test_what_an_engine_takes_in_the_process_is_counted() -> None:
    planned, measured = planned_and_measured(next(case for case in CASES if case.how == "sampling"))
    assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_an_update_and_sampling_are_added_up_where_they_are_at_the_same_time() -> None:
    together, apart = (
        plan_memory(load_recipe(None, ["--rollout.mode", mode, *_LOCAL]), gpus=1, memory=0)[0].uses
        for mode in ("async", "partial")
    )
    assert together.keys() > {"activations", "gradients", "a pass of sampling"}
    assert apart == {name: size for name, size in together.items() if name != "a pass of sampling"}
    assert "a pass of sampling" not in (
        plan_memory(load_recipe(None, ["--rollout.mode", "async", "--engine.name", "vllm"]), gpus=1, memory=80 * GB)[
            0
        ].uses
    )
    alone = ["--rollout.mode", "async", "--rollout.max_context_tokens", "2048", "--engine.max_batch_size", "1"]
    few, enough = (
        plan_memory(load_recipe(None, [*alone, "--engine.max_prefill_tokens", tokens, *_LOCAL]), gpus=1, memory=0)[
            0
        ].uses
        for tokens in ("1", "2048")
    )
    assert few == enough  # a prompt of 2,048 tokens is a pass of its own
    many = ["--engine.max_batch_size", "2048", "--engine.max_prefill_tokens", "1000000"]
    large = plan_memory(load_recipe(None, [*many, *_LOCAL]), gpus=1, memory=0)[0].uses
    assert "a pass of sampling" in large
    assert "gradients" not in large


RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def header(recipe: str) -> str:
    """Return the comment that a recipe begins with, in one line."""
    lines = (EXAMPLES / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()[1:]
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), lines))


def with_its_config(recipe: str, folder: Path) -> list[str]:
    """Return options with which a recipe reads the configuration of its model from a folder."""
    name = yaml.safe_load((EXAMPLES / f"{recipe}.yaml").read_text(encoding="utf-8"))["model"]["name_or_path"]
    return ["--model.name_or_path", str(folder_of(name.removeprefix("Qwen/Qwen3-"), folder))]


@pytest.mark.slow
@pytest.mark.process
@each("recipe", RECIPES)
def test_the_recipes_fit_where_they_say_and_a_tenth_is_left(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = list[list[ProcessMemory]]()

    def plan(*given: Any, **how: Any) -> list[ProcessMemory]:
        planned.append(plan_memory(*given, **how))
        return planned[-1]

    monkeypatch.setattr("agentrl.run.memory.plan_memory", plan)
    options, words = with_its_config(recipe, tmp_path), header(recipe)
    nodes, gpus, memory = re.findall(r"(?:(\d+) nodes of )?(one|\d+) GPUs? of (\d+) GB", words)[0]
    num_gpus, size = int(nodes or 1) * (1 if gpus == "one" else int(gpus)), int(memory) * GB
    main(["plan", str(EXAMPLES / f"{recipe}.yaml"), "--memory", memory, *options])
    assert "warning" not in capsys.readouterr().out
    assert f"`agentrl plan examples/gpu/{recipe}.yaml --memory {memory}`" in words
    given, (processes,) = load_recipe(EXAMPLES / f"{recipe}.yaml", options), planned
    for process in processes:
        assert process.total < 0.9 * size + 1
        assert process.at_start == 0
        assert process.cached_tokens is None or process.cached_tokens >= 2 * given.rollout.max_context_tokens
    servers = given.deployment.servers
    assert [process.count for process in processes] == [
        given.deployment.trainers,
        *([servers * given.deployment.tensor_parallel] if servers else []),
    ]
    assert sum(process.count for process in processes) == num_gpus
    assert given.rollout.samples_during_update == bool(servers)  # or servers and trainers would wait for each other


@each("recipe", RECIPES)
def test_the_recipes_train_real_work_and_the_hours_they_say_follow_from_their_fields(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words = with_its_config(recipe, tmp_path), header(recipe)
    given = load_recipe(EXAMPLES / f"{recipe}.yaml", options)
    assert given.env.id in ("sql_analyst", "search", "customer_service", "bfcl")
    assert given.evaluation.every > 0
    assert given.report.trackers
    product, hours = re.findall(r"Hours, by arithmetic \(docs/training\.md\): ([\dmax(), */+]+) = ([\d.]+)", words)[0]
    assert round(eval(product, {"max": max}), 1) == float(hours)
    episodes = given.rollout.num_groups * given.rollout.group_size
    assert product.startswith(f"{given.train.steps} * ")
    assert set(re.findall(r"[(,+] ?(\d+) \* \d+ / ", product)) == {str(episodes)}
    for tokens in re.findall(rf"{episodes} \* (\d+)", product):
        assert int(tokens) < given.rollout.max_context_tokens
    if nodes := re.findall(r"--slurm --nodes (\d+)", words):
        main(["up", str(EXAMPLES / f"{recipe}.yaml"), "--slurm", "--nodes", nodes[0], *options])
        assert f"#SBATCH --nodes={nodes[0]}\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.process
def test_servers_sample_the_episodes_of_a_step_while_the_others_train(tmp_path: Path) -> None:
    def live(recipe: str, *options: str, gpus: int = 8) -> int:
        given = load_recipe(EXAMPLES / f"{recipe}.yaml", [*with_its_config(recipe, tmp_path), *options])
        return plan_memory(given, gpus=gpus, memory=80 * GB)[-1].live

    assert live("qwen3-8b") == 32 * 8 // 4
    assert live("qwen3-30b-a3b") == 32 * 8 // 2
    assert live("qwen3-8b-lora", gpus=1) == 16 * 8
    assert live("qwen3-8b", "--rollout.max_live_episodes", "20") == 20
    assert live("qwen3-8b", "--engine.max_batch_size", "10") == 10
    # In sync mode two groups of eight are all that there is.
    assert live("qwen3-8b", "--rollout.mode", "sync", "--rollout.num_groups", "2") == 4
    assert live("qwen3-8b", "--rollout.num_groups", "2") == 3 * 4  # and those of two steps ahead


@pytest.mark.slow
def test_a_plan_warns_of_servers_that_would_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model.name_or_path", str(folder_of("8B", tmp_path))]

    def printed(*options: str) -> str:
        main(["plan", str(EXAMPLES / "qwen3-8b.yaml"), *model, *options])
        return " ".join(capsys.readouterr().out.split())

    room = "370,405 tokens: 22 sequences of rollout.max_context_tokens. Live sequences a server: "
    full, idle = printed(), printed("--rollout.max_live_episodes", "8")
    assert f"{room}64. Counted" in full
    assert f"{room}8. warning: less than half of that room is used; set rollout.max_live_episodes to null" in idle


@pytest.mark.slow
@pytest.mark.process
def test_a_reference_is_counted_wherever_a_run_keeps_one(tmp_path: Path) -> None:
    recipe = yaml.safe_load((EXAMPLES / "qwen3-8b.yaml").read_text(encoding="utf-8"))
    model = str(folder_of("8B", tmp_path))

    def reference(*changes: str, **sections: Any) -> int:
        given = load_recipe(recipe | sections, ["--model.name_or_path", model, *changes])
        (process,) = (one for one in plan_memory(given, gpus=8, memory=80 * GB) if one.name == "training")
        return process.uses.get("reference", 0) * process.count

    plain, adapted = (count_weights(Qwen3Config.from_pretrained(model), lora) for lora in (None, LoraSettings()))
    lora, kl = ["--model.lora", "{}"], ["--loss.kl_coefficient", "0.1"]
    assert reference() == 0
    assert reference(*kl) == pytest.approx(4 * plain.total, rel=1e-6)
    assert reference(credit={"scheme": "distill", "teacher": "reference"}) == reference(*kl)
    assert reference(*lora, *kl) == pytest.approx(2 * adapted.total + 2 * adapted.trained, rel=1e-6)  # frozen: half
    assert reference(*lora, *kl, "--train.sharding", "none") == 4 * 4 * adapted.trained


@pytest.mark.slow
@pytest.mark.process
def test_a_plan_says_that_episodes_with_rewritten_history_may_take_more(tmp_path: Path) -> None:
    model = ["--model.name_or_path", str(folder_of("0.6B", tmp_path)), "--train.max_tokens_per_micro_batch", "8192"]

    def told(*changes: str) -> str:
        command = Command(
            "plan", EXAMPLES / "qwen3-0.6b.yaml", *model, "--rollout.max_context_tokens", "4096", *changes
        )
        command.wait()
        return " ".join(command.out.split())

    words = "one pass of all its contexts, up to 3. Where these have more than the 8,192 tokens that are counted here"
    assert words in told("--rollout.history.turns", "2", "--rollout.max_turns", "3")
    assert "all its contexts" not in told("--rollout.history.turns", "2", "--rollout.max_turns", "2")
    assert "all its contexts" not in told("--rollout.max_turns", "3")


@pytest.mark.slow
@each("lora", [None, LoraSettings(rank=2, target_modules=("q_proj",))])
def test_kept_versions_are_counted_in_the_hosts_memory(lora: LoraSettings | None, tmp_path: Path) -> None:
    model = tiny_model("Qwen3", vocab_size=97)
    model.config.save_pretrained(tmp_path)
    if lora is not None:
        add_lora(model, lora)
    kept = KeptVersions(model.parameters(), most=3)
    for version in range(4):
        kept.keep(version)
    held = sum(tensor.nbytes for weights in kept._weights.values() for tensor in weights)
    plain = ["--model.name_or_path", str(tmp_path)]
    if lora is not None:
        plain += ["--model.lora", lora.model_dump_json()]
    options = [*plain, "--loss.anchor", "sampled", "--loss.kept_versions", "3"]

    def counted(*options: str, gpus: int = 1) -> int:
        return plan_memory(load_recipe(None, options), gpus=gpus, memory=0)[0].kept_versions

    assert counted(*options) == counted(*options, gpus=4) == held > 0
    assert counted(*options, "--train.sharding", "full", gpus=4) == held // 4
    assert counted(*options, "--train.sharding", "full", "--train.replicas", "2", gpus=4) == held // 2
    assert counted(*plain) == 0


@pytest.mark.slow
@pytest.mark.process
def test_a_plan_says_what_kept_versions_take(tmp_path: Path) -> None:
    model = ["--model.name_or_path", str(folder_of("0.6B", tmp_path))]
    command = Command(
        "plan", EXAMPLES / "qwen3-0.6b.yaml", *model, "--loss.anchor", "sampled", "--loss.kept_versions", "1000"
    )
    command.wait()
    # 596,049,920 weights of 4 bytes.
    assert "kept_versions: 1000 take 2384.20 GB of the host's memory for each" in " ".join(command.out.split())


@pytest.mark.slow
def test_a_model_is_counted_once_for_all_plans_of_it(tmp_path: Path) -> None:
    given = load_recipe(EXAMPLES / "qwen3-8b.yaml", ["--model.name_or_path", str(folder_of("8B", tmp_path))])
    sizes = model_sizes(given)
    plan = partial(plan_memory, gpus=8, memory=80 * GB)
    assert plan(given, sizes=sizes) == plan(given)
    assert list(remedies(given, gpus=8, memory=80 * GB, sizes=sizes)) == list(remedies(given, gpus=8, memory=80 * GB))
    assert sizes.kept.cache_info().misses == 2  # with checkpointing and without: the other remedies keep what is kept


@pytest.mark.parametrize(("memory", "is_there"), [(0, True), (80 * GB, False)])
def test_weights_before_an_update_are_in_the_hosts_memory(memory: int, is_there: bool) -> None:
    free, bounded = (load_recipe(None, ["--train.target_kl", target]) for target in ("null", "0.02"))
    needed = [plan_memory(each, gpus=1, memory=memory)[0].total for each in (free, bounded)]
    assert (needed[1] > needed[0]) == is_there


@pytest.mark.slow
@pytest.mark.process
def test_what_does_not_fit_is_refused_with_the_fields_that_help(tmp_path: Path) -> None:
    model = ["--model.name_or_path", str(folder_of("8B", tmp_path))]
    command = Command("plan", EXAMPLES / "qwen3-8b.yaml", *model, "--gpus", 6)
    err = command.wait()
    assert command.returncode == 2
    words = " ".join(err.split())
    assert "a training process needs 83.4 GB, and a GPU has 80. What helps, each by itself: model.lora: {}, " in words
    assert "train.offload: [optimizer, weights] (" in words
    assert "The cheapest that fits, with " in words
    assert "GB: --train.offload '[optimizer, weights]'" in words
    given = load_recipe(EXAMPLES / "qwen3-8b.yaml", [*model, "--train.gradient_checkpointing", "false"])
    least = min(remedies(given, gpus=8, memory=80 * GB), key=lambda one: one[1])
    assert least[0] == "train.gradient_checkpointing: true"
    with pytest.raises(ConfigError, match="4 servers of 1 GPUs leave none of 4 to train on"):
        plan_memory(given, gpus=4, memory=80 * GB)
    with pytest.raises(ConfigError, match=r"A folder with its config\.json is enough"):
        plan_memory(
            load_recipe(EXAMPLES / "qwen3-8b.yaml", ["--model.name_or_path", str(tmp_path / "none")]), gpus=8, memory=80
        )


def recipe_of(size: str, folder: Path, *options: str) -> Recipe:
    sections = {"precision": "bfloat16", "gradient_checkpointing": True}
    model = ["--model.name_or_path", str(folder_of(size, folder)), "--rollout.max_context_tokens", "8192"]
    return load_recipe({"train": sections}, [*model, *options])


@pytest.mark.slow
def test_what_waits_in_the_hosts_memory_is_not_counted(tmp_path: Path) -> None:
    def uses(*options: str, gpus: int = 1) -> dict[str, int]:
        return dict(plan_memory(recipe_of("4B", tmp_path, *options), gpus=gpus, memory=80 * GB)[0].uses)

    num = 4_022_468_096  # weights
    plain, away = uses("--engine.name", "vllm"), uses("--engine.name", "vllm", "--train.offload", "[optimizer]")
    assert plain["optimizer"] == 8 * num
    assert away == {name: size for name, size in plain.items() if name != "optimizer"}
    # vLLM sleeps in an update, and while it samples weights and moments are there unless they are away.
    sleeping = ("--engine.name", "vllm", "--engine.sleep", "true", "--engine.vllm", "{gpu_memory_utilization: 0.9}")
    assert uses(*sleeping).keys() == {"weights", "optimizer", "vLLM", "CUDA and kernels"}
    both = uses(*sleeping, "--train.offload", "[optimizer, weights]")
    assert both == {"vLLM": int(0.9 * 80 * GB), "CUDA and kernels": plain["CUDA and kernels"]}
    assert "vLLM" not in uses(*sleeping[:4], "--train.offload", "[optimizer, weights]")  # an update takes more
    # Frozen weights are kept in half precision, sharded or not.
    lora = ("--model.lora", "{}", "--train.sharding", "full", "--engine.max_batch_size", "1")
    sharded = uses(*lora, gpus=4)["weights"]
    trained = count_weights(Qwen3Config.from_pretrained(tmp_path), LoraSettings()).trained
    assert sharded == (2 * num + 4 * trained) // 4


@pytest.mark.slow
def test_layers_that_are_not_computed_again_keep_everything(tmp_path: Path) -> None:
    def activations(checkpointing: str) -> int:
        options = ("--train.gradient_checkpointing", checkpointing, "--engine.name", "vllm")
        return plan_memory(recipe_of("0.6B", tmp_path, *options), gpus=1, memory=80 * GB)[0].uses["activations"]

    no_layer, second, fourth, twentieth, all_layers = map(activations, ("false", "2", "4", "20", "true"))
    a_layer = (second - all_layers) // 14  # of 28
    assert fourth - all_layers == 21 * a_layer
    assert twentieth - all_layers == 26 * a_layer  # layers 0 and 20 keep their inputs alone
    assert no_layer - all_layers == pytest.approx(27 * a_layer, rel=0.01)  # one is computed again in any case


@pytest.mark.slow
def test_a_rounded_copy_of_the_weights_is_counted_and_leaves_smaller_activations(tmp_path: Path) -> None:
    def uses(*options: str) -> dict[str, int]:
        few = ("--engine.name", "vllm", "--train.gradient_checkpointing", "false", *options)
        return dict(plan_memory(recipe_of("0.6B", tmp_path, *few), gpus=1, memory=80 * GB)[0].uses)

    cast, copied = uses(), uses("--train.bfloat16_copy", "true")
    in_layers = 596_049_920 - 151_936 * 1024 - 1024  # all but the embedding, which is the head, and the last norm
    assert copied.pop("layers put together") == 2 * in_layers
    # Autocast's copies are kept with the activations, and hidden states between layers in float32.
    assert copied.pop("activations") < cast.pop("activations") - 2 * in_layers
    assert copied == cast
    lora = ("--model.lora", "{}")
    trained = count_weights(Qwen3Config.from_pretrained(tmp_path), LoraSettings()).trained
    assert uses(*lora, "--train.bfloat16_copy", "true")["layers put together"] == 2 * trained


def test_moments_come_back_for_a_weight_at_a_time(tmp_path: Path) -> None:
    folder = folder_of("0.6B", tmp_path, tie_word_embeddings=False)
    few = [
        "--train.max_tokens_per_micro_batch",
        "64",
        "--rollout.max_context_tokens",
        "64",
        "--rollout.max_turn_tokens",
        "8",
    ]
    recipe = load_recipe(None, ["--model.name_or_path", str(folder), "--train.offload", "[optimizer]", *few])
    uses = plan_memory(recipe, gpus=1, memory=80 * GB)[0].uses
    assert uses["optimizer, of one weight"] == 8 * 151936 * 1024  # the embedding's: more than the few activations
    assert "optimizer" not in uses


@pytest.mark.slow
def test_the_cheapest_recipe_that_fits_is_found(tmp_path: Path) -> None:
    def fit(size: str, memory: int, *options: str, fixed: tuple[str, ...] = ()) -> dict[str, Any] | None:
        recipe = recipe_of(size, tmp_path, *options)
        found = cheapest_fit(recipe, gpus=1, memory=memory * GB, fixed=fixed)
        if found is None:
            return None
        planned, *_ = plan_memory(changed(recipe, found[0]), gpus=1, memory=memory * GB)
        assert planned.total == found[1] <= 0.9 * memory * GB
        return found[0]

    assert fit("0.6B", 80) == {}
    assert fit("4B", 80) == {
        "train.offload": ["optimizer", "weights"],
        "engine.name": "vllm",
        "engine.sleep": True,
    }
    # Adapters only where nothing else is enough, and at their own rate.
    adapters = {"model.lora": {}, "train.learning_rate": 1e-5}
    assert fit("8B", 80) == adapters
    assert fit("8B", 80, fixed=("model.lora",)) is None


def test_adapters_are_counted_without_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("0.6B", tmp_path, "--model.lora", "{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    counted = model_sizes(recipe).weights
    assert counted.trained == 10_092_544  # as peft has them
    assert plan_memory(recipe, gpus=1, memory=80 * GB)[0].uses["optimizer"] == 8 * counted.trained
