"""Several real processes on one machine (gloo): what they compute together is what one computes."""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it does say so, at run time
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.multiprocessing.spawn import start_processes
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl import Credit, TrajectoryGroup
from agentrl.distributed import sharding
from agentrl.distributed.processes import (
    all_gather,
    choose_interface,
    is_main,
    naming_absent_ranks,
    process_index,
    scatter,
    set_deadline,
    to_rank_zero,
)
from agentrl.engine.base import CopyState, IdleEngine
from agentrl.errors import ConfigError, TrainingError
from agentrl.learn import policy_state
from agentrl.learn.config import CovarianceConfig, LossConfig, NLLConfig, TrainConfig
from agentrl.learn.learner import Learner
from agentrl.learn.plan import Planner
from agentrl.learn.signals import CriticConfig
from agentrl.learn.signals.critic import Critic
from agentrl.learn.signals.scoring import score_tokens
from agentrl.learn.tokens import TokenBatch
from agentrl.models.auto_classes import freeze_towers
from agentrl.policy.config import Layout, LoraSettings
from agentrl.policy.layout import lay_out, recurrent
from agentrl.policy.lora import merged_weights
from agentrl.recipe.config import load_recipe
from agentrl.run.parts import build_accelerator
from agentrl.run.weight_sync import WeightSync
from agentrl.types import TaskShard
from tests.support.architectures import tiny_model
from tests.support.learners import TOKENIZER, make_learner
from tests.support.played import new_policy, play
from tests.support.processes import START_METHOD
from tests.support.tiers import first_quick
from tests.support.trajectories import some_demonstrations, some_groups

pytestmark = pytest.mark.process

Sharding = Literal["none", "full"]


def together(num_processes: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Do the same in several processes; return what each returned, None where it was killed."""
    # As torch's launcher does it: what the processes leave word in outlives each of them.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = Path(mkdtemp(prefix="results-", dir=folder))  # a port comes again
    context = start_processes(
        _enter,
        (num_processes, store.port, results, work, arguments),
        num_processes,
        join=False,
        start_method=START_METHOD,
    )
    for process in context.processes:
        process.join(timeout=400)
        assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    files = [results / str(index) for index in range(num_processes)]
    return [pickle.loads(file.read_bytes()) if file.is_file() else None for file in files]


def _enter(
    index: int, num_processes: int, port: int, results: Path, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    who = {"WORLD_SIZE": num_processes, "RANK": index, "LOCAL_RANK": index}
    os.environ.update({name: str(value) for name, value in {**where, **who}.items()})
    torch.set_num_threads(1)
    (results / str(index)).write_bytes(pickle.dumps(work(*arguments)))


def credited(sizes: list[int], idle: tuple[int, ...] = ()) -> tuple[list[TrajectoryGroup], list[list[Credit]]]:
    """Groups of these sizes, some of which have no advantage anywhere; of several processes the first has them."""
    if not is_main():
        return [], []
    groups, rng = some_groups(sizes), np.random.default_rng(1)
    credits = [
        [Credit.from_tokens(t, rng.normal(size=t.num_action_tokens) * (number not in idle)) for t in group.trajectories]
        for number, group in enumerate(groups)
    ]
    return groups, credits


def gradients(
    learner: Learner, groups: list[TrajectoryGroup], credits: list[list[Credit]], version: int = 1
) -> tuple[Any, list[Tensor]]:
    """Update once, in float64; return the metrics, and the gradient of each weight before the optimizer took it."""
    found = []

    def keep() -> None:
        grads = [p.grad for p in learner.state.policy.parameters()]
        found.extend([g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads if g is not None])

    if learner.loss.anchor == "sampled":  # by what tokens of version 0 are compared with
        learner.kept.keep(0)
        with torch.no_grad():
            for parameter in learner.state.policy.parameters():
                parameter.mul_(1.01)
    optimizer = getattr(
        learner.state.optimizer, "optimizer", learner.state.optimizer
    )  # out of what accelerate wraps around it
    optimizer.register_step_pre_hook(lambda *_: keep())
    return learner.update(groups, credits, version=version), found


def update(
    sharding: Sharding, layout: Layout, sizes: list[int], idle: tuple[int, ...], loss: LossConfig
) -> tuple[Any, list[Tensor]]:
    learner = make_learner(
        loss=loss,
        layout=layout,
        has_reference=loss.kl_coefficient > 0,
        is_double=True,
        num_minibatches=1,
        max_tokens_per_micro_batch=60,
        max_grad_norm=1e9,
        sharding=sharding,
    )
    learner.demonstrations = some_demonstrations(5)
    return gradients(learner, *credited(sizes, idle))


SOME = LossConfig(clip_low=0.1, clip_high=0.1)
MIXTURE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "experts_implementation": "eager",  # the other takes no float64
}
TERMS = LossConfig(
    covariance=CovarianceConfig(share=0.2, band=(-9.0, 9.0)), nll=NLLConfig(of="demonstrations", batch_size=3)
)
CASES = [
    pytest.param([4, 2], (), TERMS, id="drawn tokens and demonstrations"),
    pytest.param([4, 3, 1, 2], (), SOME, id="uneven work"),
    pytest.param([4], (), SOME, id="less to share out than processes"),
    pytest.param([3, 3, 3], (0, 1, 2), SOME, id="no advantage anywhere"),
    pytest.param(
        [2, 4, 2], (1,), SOME.model_copy(update={"unit": "turn", "aggregation": "token-mean"}), id="idle group"
    ),
    pytest.param([4, 2], (), SOME.model_copy(update={"kl_coefficient": 0.1}), id="with a reference"),
    pytest.param([4, 2], (), LossConfig(trust="calibrated", reject=1.1), id="calibrated"),
    pytest.param([4, 2], (), LossConfig(trust="kernel"), id="kernel"),
    pytest.param([4, 2], (), LossConfig(trust="fixed", clip_low=0.1, clip_high=0.1), id="fixed"),
    pytest.param([4, 2], (), LossConfig(unit="turn", anchor="sampled", mismatch="truncate"), id="exact staleness"),
]


@pytest.mark.parametrize(("sizes", "idle", "loss"), CASES)
@pytest.mark.parametrize(
    ("num_processes", "sharding", "layout"), first_quick([(2, "full", "tree"), (2, "none", "tree")])
)
def test_metrics_and_gradients_are_those_of_one_process(
    num_processes: int,
    sharding: Sharding,
    layout: Layout,
    sizes: list[int],
    idle: Any,
    loss: LossConfig,
    tmp_path: Path,
) -> None:
    metrics, expected = update("none", layout, sizes, idle, loss)
    largest = max((float(gradient.abs().max()) for gradient in expected), default=0.0)
    assert (largest > 1e-3) == (idle != (0, 1, 2))
    for found_metrics, found in together(num_processes, tmp_path, update, sharding, layout, sizes, idle, loss):
        assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * largest)


@pytest.mark.parametrize(("sharding", "layout"), first_quick([("none", "packed"), ("full", "padded")]))
def test_three_processes_and_other_layouts(sharding: Sharding, layout: Layout, tmp_path: Path) -> None:
    test_metrics_and_gradients_are_those_of_one_process(3, sharding, layout, [4, 3, 1, 2], (), SOME, tmp_path)


@pytest.mark.parametrize("trust", first_quick(["calibrated", "fixed", "kernel"]))
def test_every_trust_region_on_three_processes(trust: Any, tmp_path: Path) -> None:
    loss = LossConfig(trust=trust)
    test_metrics_and_gradients_are_those_of_one_process(3, "none", "tree", [4, 3, 2], (), loss, tmp_path)


def multimodal(name: str) -> list[Tensor]:
    """The gradients of two updates, one after the other, but for what norms round."""
    model = tiny_model(name, vocab_size=len(TOKENIZER)).double()
    freeze_towers(model)
    learner = make_learner(model=model, layout="padded", num_minibatches=1, max_tokens_per_micro_batch=60)
    return [gradient for _ in range(2) for gradient in gradients(learner, *credited([4, 3, 2]))[1]]


@pytest.mark.parametrize("name", first_quick(["Gemma 3 with images", "Mistral 3"]))
def test_multimodal_models_are_trained_by_two_processes_as_by_one(name: str, tmp_path: Path) -> None:
    expected = multimodal(name)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for found in together(2, tmp_path, multimodal, name):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * largest)


def hybrid(sharding: Sharding) -> tuple[list[Tensor], bool]:
    """The gradients of an update of a model with recurrent parts, and whether these computed a trunk."""
    with patch.object(recurrent, "_LEAST_SAVED", 2):
        model = tiny_model("Qwen3.5", vocab_size=len(TOKENIZER))
        learner = make_learner(model=model, layout="tree", num_minibatches=1, sharding=sharding)
        found = gradients(learner, *credited([4, 3, 2]))[1]
        rows = [
            row[:-1]
            for row in TokenBatch.from_trajectories([t for g in some_groups([4, 3, 2]) for t in g.trajectories]).rows
        ]
        return found, bool(recurrent.fork(lay_out(rows, "tree")[0].paths, continues=True)[0])


@pytest.mark.parametrize("sharding", first_quick(["full", "none"]))
def test_recurrent_parts_go_on_from_what_rows_share_on_several_processes(sharding: Sharding, tmp_path: Path) -> None:
    expected, has_trunk = hybrid("none")
    assert has_trunk
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for found, _ in together(2, tmp_path, hybrid, sharding):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * largest)


def routed(sharding: Sharding) -> dict[str, float]:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**MIXTURE, vocab_size=len(TOKENIZER))
    model = Qwen3MoeForCausalLM(config).double()
    settings: dict[str, Any] = {"num_minibatches": 2, "max_tokens_per_micro_batch": 60, "sharding": sharding}
    return make_learner(model=model, loss=SOME, **settings).update(*credited([4, 3, 2]), version=1)


@pytest.mark.parametrize("sharding", first_quick(["full", "none"]))
def test_changed_experts_are_told_alike(sharding: Sharding, tmp_path: Path) -> None:
    expected = routed("none")["moe/changed_experts"]
    assert 0.01 < expected < 0.9
    assert [found["moe/changed_experts"] for found in together(2, tmp_path, routed, sharding)] == [expected] * 2


def accelerated() -> tuple[int, str]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    accelerator = build_accelerator(load_recipe({"env": {"id": "calculator"}}).train)
    return accelerator.num_processes, accelerator.device.type


def test_processes_without_a_gpu_train_together_where_no_device_is_named(tmp_path: Path) -> None:
    assert together(2, tmp_path, accelerated) == [(2, "cpu")] * 2


def told_and_dealt() -> tuple[list[str], str, list[int]]:
    """What a process hears of all, what it is dealt, and how many bytes it sends in either."""
    make_learner()
    sent: list[int] = []
    send, index = dist.send, process_index()

    def counted(tensor: Tensor, *args: Any, **named: Any) -> None:
        sent.append(tensor.nbytes)
        send(tensor, *args, **named)

    with patch.object(dist, "send", counted):
        told = to_rank_zero([f"{index}" * 1000, f"{index}"])
        mine = scatter(lambda: ["first", "second" * 1000, "third"])
    return told, mine, sent


def test_the_first_hears_all_and_the_others_their_share_alone(tmp_path: Path) -> None:
    first, second, third = together(3, tmp_path, told_and_dealt)
    assert first[:2] == (["0" * 1000, "0", "1" * 1000, "1", "2" * 1000, "2"], "first")
    assert second[:2] == ([], "second" * 1000)
    assert third[:2] == ([], "third")
    for index, (_, _, sent) in enumerate([first, second, third]):
        lengths, contents = sent[::2], sent[1::2]
        assert set(lengths) == {8}
        assert [round(num, -3) for num in contents] == ([6000, 0] if index == 0 else [1000])


def shortened(sharding: Sharding) -> tuple[dict[str, float], dict[str, Tensor]]:
    settings: dict[str, Any] = {"num_minibatches": 3, "max_tokens_per_micro_batch": 60, "target_kl": 1e-3}
    learner = make_learner(loss=LossConfig(anchor="recomputed"), sharding=sharding, is_double=True, **settings)
    metrics = learner.update(*credited([4, 3, 2]), version=1)
    return metrics, {name: tensor.clone() for name, tensor in learner.state.weights()}


def sent(dtype: torch.dtype, bucket_bytes: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
    """Return this rank's weights, as they were gathered everywhere and for rank 0; bytes and calls of the latter."""
    learner = make_learner(sharding="full")
    learner.update(*credited([4, 3, 2]), version=1)
    whole = {name: tensor.clone() for name, tensor in learner.state.weights()}
    sizes = list[int]()

    def gather(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        sizes.append(tensor.nbytes)
        gather_of_torch(tensor, *args, **kwargs)

    gather_of_torch = dist.gather
    buckets = partial(sharding.gather_to, bucket_bytes=bucket_bytes)
    with patch.object(dist, "gather", gather), patch.object(policy_state, "gather_to", buckets):
        found = dict(learner.state.weights_for(0, dtype))
    return whole, found, sum(sizes), len(sizes)


@pytest.mark.parametrize("num", [2, 3])
def test_weights_for_a_sync_are_whole_on_the_rank_that_sends_them_alone_and_gathered_in_their_dtype(
    num: int, tmp_path: Path
) -> None:
    (whole, found, num_bytes, _), *others = together(num, tmp_path, sent, torch.bfloat16, 2**28)
    assert list(found) == list(whole)
    for name, tensor in whole.items():
        expected = tensor.bfloat16() if tensor.ndim > 1 else tensor
        assert found[name].dtype == expected.dtype, name
        assert found[name].equal(expected), name
    in_float32 = sum(tensor.nbytes for tensor in whole.values()) / num
    assert num_bytes == pytest.approx(in_float32 / 2, rel=0.03)  # vectors keep their dtype, uneven rows are padded
    for _, meta, sent_bytes, calls in others:
        assert {name: tensor.shape for name, tensor in meta.items()} == {name: t.shape for name, t in whole.items()}
        assert all(tensor.is_meta for tensor in meta.values())
        assert (sent_bytes, calls) == (num_bytes, 1)


def test_shards_are_gathered_in_buckets_with_the_same_result(tmp_path: Path) -> None:
    (whole, found, _, calls), *_ = together(2, tmp_path, sent, torch.float32, 3000)
    assert 2 < calls < len(whole)
    for name, tensor in whole.items():
        assert found[name].equal(tensor), name


COPIES = {"http://a": CopyState(lost="gone"), "http://b": CopyState(has_adapter=True)}


class OneServer(IdleEngine):
    """An engine of rank 0 that keeps what it is given."""

    dtype = torch.bfloat16
    loaded: dict[str, Tensor]

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        self.loaded = dict(named_tensors)
        self.version = version


class SharedServers(IdleEngine):
    """On rank 1 it follows the servers of rank 0."""

    syncs = False
    copies_of_first: Mapping[str, CopyState] | None = None

    def copies(self) -> dict[str, CopyState]:
        raise AssertionError("asked of a rank that follows")

    async def follow(self, copies: Mapping[str, CopyState], version: int) -> None:
        self.copies_of_first, self.version = copies, version


class LeadingServers(OneServer):
    syncs = True

    def copies(self) -> dict[str, CopyState]:
        return COPIES

    async def follow(self, copies: Mapping[str, CopyState], version: int) -> None:
        raise AssertionError("it knows")


def synced(*, is_shared: bool = False) -> tuple[dict[str, Tensor], Any, int]:
    """Sync sharded weights to the engine of rank 0; return them, what this rank's got, and the gathers to one rank."""
    learner = make_learner(sharding="full")
    first, other = (LeadingServers, SharedServers) if is_shared else (OneServer, IdleEngine)
    engine: Any = first() if is_main() else other()

    async def freeze() -> None:
        """Nothing is sampled."""

    context = SimpleNamespace(engine=engine)
    pool: Any = SimpleNamespace(context=context, shard=TaskShard(int(is_main() or is_shared)), freeze=freeze)
    with asyncio.Runner() as runner, patch.object(dist, "gather", wraps=dist.gather) as gather:
        WeightSync(pool, learner, runner=runner, seed=0, config=TrainConfig()).push(3)
    assert engine.version == 3
    got = getattr(engine, "loaded", None) or getattr(engine, "copies_of_first", None)
    return dict(learner.state.weights()), got, gather.call_count


def test_a_sync_gathers_weights_on_the_only_rank_that_has_an_engine_in_its_dtype(tmp_path: Path) -> None:
    (whole, loaded, first), (_, none, second) = together(2, tmp_path, synced)
    assert (none, first, second) == (None, 1, 1)
    assert loaded is not None
    assert all(loaded[name].equal(tensor.bfloat16() if tensor.ndim > 1 else tensor) for name, tensor in whole.items())


def test_ranks_that_share_servers_agree_after_a_sync_which_have_the_weights(tmp_path: Path) -> None:
    (whole, loaded, first), (_, copies, second) = together(2, tmp_path, partial(synced, is_shared=True))
    assert (copies, first, second) == (COPIES, 1, 1)
    assert set(loaded) == set(whole)


def listening(cases: list[tuple[str, str | None]]) -> list[set[str]]:
    """Return the addresses at which gloo listens, by those of rank 0 and the interfaces that a user has set."""
    found = []
    for host, interface in cases:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ |= {"MASTER_ADDR": host} | ({} if interface is None else {"GLOO_SOCKET_IFNAME": interface})
        choose_interface()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before = {each.laddr for each in psutil.Process().net_connections()}
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        now = {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
        found.append({address.ip for address in now - before})
        dist.destroy_process_group()
    return found


def test_ranks_are_connected_by_the_interface_towards_the_first(tmp_path: Path) -> None:
    addresses = [each.address for every in psutil.net_if_addrs().values() for each in every if "." in each.address]
    cases: list[tuple[str, str | None]] = [("127.0.0.2", None), ("nobody.invalid", None)]
    for address in addresses:
        cases += [(address, None), (address, "lo")]
    found = together(1, tmp_path, listening, cases)[0]
    assert [found[0], *found[2:]] == [
        {"127.0.0.1"},
        *({own} for address in addresses for own in (address, "127.0.0.1")),
    ]


def replicated(replicas: int, folder: Path) -> tuple[Any, list[Tensor], dict[str, Tensor], dict[str, Tensor], bool]:
    """Metrics, gradients, weights, those for a sync, and whether a resumed run goes on to the last bit."""
    settings: dict[str, Any] = {"loss": SOME, "is_double": True, "num_minibatches": 1, "max_tokens_per_micro_batch": 60}
    settings |= {"sharding": "full", "replicas": replicas}
    learner, resumed = make_learner(**settings), make_learner(**settings)
    metrics, found = gradients(learner, *credited([4, 3, 1, 2]))
    sent = {name: tensor.clone() for name, tensor in learner.state.weights_for(0, None)}
    learner.state.save(folder)
    all_gather([0])
    resumed.state.load(folder)
    rows = [one.update(*credited([2, 3]), version=2) for one in (learner, resumed)]
    weights, others = (dict(one.state.weights()) for one in (learner, resumed))
    is_same = rows[0] == rows[1] and all(torch.equal(others[name], tensor) for name, tensor in weights.items())
    return metrics, found, weights, sent, is_same


@pytest.mark.slow
def test_replicas_of_shards_train_sync_and_resume_as_one_process(tmp_path: Path) -> None:
    metrics, gradient, weights, sent, _ = replicated(1, tmp_path / "alone")
    first, *others = together(4, tmp_path, replicated, 2, tmp_path / "shards")
    for found_metrics, found_gradient, found_weights, _, is_same in (first, *others):
        assert is_same
        assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
        for one, other in zip(found_gradient, gradient, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        for name, tensor in weights.items():
            torch.testing.assert_close(found_weights[name], tensor, rtol=1e-7, atol=1e-9)
    for name, tensor in sent.items():
        torch.testing.assert_close(first[3][name], tensor, rtol=1e-7, atol=1e-9)
    assert all(tensor.is_meta for _, _, _, of_other, _ in others for tensor in of_other.values())
    files = list((tmp_path / "shards" / "shards").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) < 1.2 * 3 * sum(tensor.nbytes for tensor in weights.values())


def notes() -> list[dict[str, Any]]:
    learner = make_learner(is_double=True, num_minibatches=2, max_tokens_per_micro_batch=60)
    groups, credits = credited([4, 3, 2])
    learner.update(groups, credits, version=0)
    notes_of = learner.diagnostics.gather()
    return [dict(notes_of(trajectory)) for group in groups for trajectory in group.trajectories]


def test_the_first_process_hears_what_all_noted_of_each_token(tmp_path: Path) -> None:
    alone = notes()
    first, _ = together(2, tmp_path, notes)
    for found, expected in zip(first, alone, strict=True):
        assert found.keys() == expected.keys() == {"ratio", "entropy", "clipped"}
        for name, column_T in expected.items():
            assert not np.isnan(column_T).any()
            np.testing.assert_allclose(found[name], column_T, rtol=1e-9)


@pytest.mark.parametrize("sharding", first_quick(["full", "none"]))
def test_updates_are_shortened_alike(sharding: Sharding, tmp_path: Path) -> None:
    metrics, weights = shortened("none")
    assert metrics["shortened_updates"] == 3
    for found, after in together(2, tmp_path, shortened, sharding):
        assert found == pytest.approx(metrics, rel=1e-6, abs=1e-9)
        for name, tensor in weights.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-6)


def trained(
    sharding: Sharding, lora: LoraSettings | None, folder: Path, steps: list[int], is_resumed: bool
) -> tuple[list[Any], dict[str, Tensor]]:
    train: dict[str, Any] = {"schedule": "cosine", "num_minibatches": 2, "max_tokens_per_micro_batch": 60}
    learner = make_learner(sharding=sharding, lora=lora, **train)
    if is_resumed:
        learner.state.load(folder)
    else:
        learner.state.save(folder.with_name("fresh"))  # which must not count as a step
    # Nothing to learn from in the second step, and in the second minibatch of the third.
    sizes = {1: ([4, 3, 2], (0, 1, 2)), 2: ([4, 3, 1], (0, 1))}
    metrics = [learner.update(*credited(*sizes.get(step, ([4, 3, 2], ()))), version=step) for step in steps]
    assert [row["skipped_minibatches"] for row in metrics] == [{1: 2, 2: 1}.get(step, 0) for step in steps]
    if not is_resumed:
        folder.mkdir(exist_ok=True)
        learner.state.save(folder)
    return metrics, {name: tensor.clone() for name, tensor in learner.state.weights()}


@pytest.mark.parametrize(
    ("sharding", "lora"), first_quick([("full", None), ("none", None), ("full", LoraSettings(rank=2))]), ids=str
)
def test_saved_and_loaded_equals_uninterrupted_bit_for_bit(
    sharding: Sharding, lora: LoraSettings | None, tmp_path: Path
) -> None:
    whole = together(2, tmp_path, trained, sharding, lora, tmp_path / "whole", [0, 1, 2, 3], False)
    early = together(2, tmp_path, trained, sharding, lora, tmp_path / "early", [0, 1], False)
    late = together(2, tmp_path, trained, sharding, lora, tmp_path / "early", [2, 3], True)
    if lora is not None:  # what is frozen stays out
        names = HuggingFaceStorageReader(str(tmp_path / "early" / "shards")).read_metadata().state_dict_metadata
        saved = [name for name in names if name.startswith("model.")]
        assert saved
        assert all(".lora_" in name for name in saved)
    for (metrics, weights), (before, _), (after, found) in zip(whole, early, late, strict=True):
        assert [*before, *after] == metrics
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    for name, tensor in whole[0][1].items():  # the same on all, to the last bit
        assert torch.equal(tensor, whole[1][1][name])
    alone, _ = trained("none", lora, tmp_path / "alone", [0, 1, 2, 3], False)
    for found, expected in zip(whole[0][0], alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def loaded_otherwise(folder: Path) -> str:
    make_learner(sharding="none").state.save(folder)
    with pytest.raises(ConfigError) as caught:
        make_learner(sharding="full").state.load(folder)
    return str(caught.value)


def test_a_checkpoint_of_another_sharding_is_refused(tmp_path: Path) -> None:
    for words in together(2, tmp_path, loaded_otherwise, tmp_path):
        assert words == f"train.sharding: {tmp_path} was written under another; resume as the run began"


def reference_kept(lora: LoraSettings | None, folder: Path) -> tuple[bool, bool]:
    """Whether a kept reference is the policy as it was, and whether it comes back from a file."""
    settings: dict[str, Any] = {"sharding": "full", "has_reference": True, "lora": lora}
    learner = make_learner(**settings, num_minibatches=1, loss=LossConfig(kl_coefficient=0.1))
    learner.update(*credited([4, 3]), version=0)
    learner.state.keep_reference()
    before = dict(learner.state.weights())
    learner.state.save_reference(folder)
    learner.update(*credited([4, 3]), version=1)
    all_gather([0])
    other = make_learner(**settings)
    other.state.load_reference(folder)

    def is_before(subject: Learner) -> bool:
        assert subject.state.reference is not None
        kept = dict(merged_weights(subject.state.reference.model))
        return all(torch.equal(kept[name], before[name]) for name in kept)

    return is_before(learner), is_before(other)


@pytest.mark.parametrize("lora", first_quick([None, LoraSettings(rank=2)]), ids=str)
def test_the_reference_of_shared_out_weights_stays_and_comes_back(lora: LoraSettings | None, tmp_path: Path) -> None:
    assert together(2, tmp_path, reference_kept, lora, tmp_path) == [(True, True)] * 2


def scores(sharding: Sharding) -> list[Any]:
    learner = make_learner(sharding=sharding, is_double=True)
    policy = learner.state.policy
    trajectories = [t for group in some_groups([3, 1, 2]) for t in group.trajectories] if is_main() else []
    return score_tokens(
        lambda micro: policy(micro.inputs, micro.slot_T, micro.target_T, 1.0)[0],
        TokenBatch.from_trajectories(trajectories),
        planner=Planner(layout="tree", max_tokens=60, device=learner.state.device),
    )


@pytest.mark.parametrize("sharding", first_quick(["full", "none"]))
def test_scores_are_shared_out_and_put_together(sharding: Sharding, tmp_path: Path) -> None:
    expected = scores("none")
    first, second = together(2, tmp_path, scores, sharding)
    for one, other in zip(first, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert second == []


def pass_in_bfloat16(sharding: Sharding, lora: LoraSettings | None) -> tuple[int, Tensor, set[torch.dtype]]:
    """How many copies of weights a pass keeps for the backward one; gradients of all weights, and their dtypes."""
    state = make_learner(sharding=sharding, precision="bfloat16", lora=lora).state
    shapes = {weight.shape for weight in state.policy.parameters() if weight.ndim == 2}
    shapes |= {torch.Size(reversed(shape)) for shape in shapes}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.shape in shapes:
            kept.append(tensor)
        return tensor

    inputs, _ = lay_out([np.arange(70)], "padded")
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_T, _ = state.wrapped(inputs, torch.arange(69), torch.arange(69), 1.0)
    num_kept = sum(tensor.untyped_storage().nbytes() > 0 for tensor in kept)
    logprobs_T.sum().backward()
    gradients = [p.grad for p in state.policy.parameters() if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return num_kept, torch.cat([gradient.flatten() for gradient in whole]), {g.dtype for g in gradients}


@pytest.mark.parametrize("lora", first_quick([None, LoraSettings(rank=2)]), ids=["whole", "adapters"])
def test_in_bfloat16_no_process_keeps_copies_of_what_is_shared_out(lora: LoraSettings | None, tmp_path: Path) -> None:
    num_kept, expected, _ = pass_in_bfloat16("none", lora)
    assert num_kept > 0  # which autocast makes
    for num_kept, found, dtypes in together(2, tmp_path, pass_in_bfloat16, "full", lora):
        assert num_kept == 0
        assert dtypes == {torch.float32}
        assert (found - expected).norm() < 0.05 * expected.norm()


def critic_after_fits(kind: Literal["head", "separate"]) -> tuple[dict[str, float], list[Tensor], int]:
    """What a critic tells of its second fit, its weights after it, and how many values this process has computed."""
    Accelerator(cpu=True)
    policy = new_policy()
    policy.double()
    critic = Critic(policy, CriticConfig(model=kind, num_minibatches=2), gamma=0.9, max_tokens=60, seed=3)
    critic._head.double()
    computed: list[int] = []
    critic._head.register_forward_hook(lambda _, args, out: computed.append(len(out)))
    played = [
        replace(t, turns=(*t.turns[:-1], replace(t.turns[-1], reward=float(number))))
        for number, t in enumerate(play(new_policy(), num=5))
    ]
    played = played if is_main() else []
    critic.fit(critic.measure(played))
    return critic.fit(critic.measure(played)), [p.detach() for p in critic._parameters()], sum(computed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_processes"), first_quick([("head", 2), ("separate", 3), ("head", 3), ("separate", 2)], num=2)
)
def test_a_critic_is_shared_out(kind: Literal["head", "separate"], num_processes: int, tmp_path: Path) -> None:
    expected_metrics, expected, num_tokens = critic_after_fits(kind)
    assert expected_metrics["critic/loss"] > 0.1
    processes = together(num_processes, tmp_path, critic_after_fits, kind)
    assert sum(num_computed for *_, num_computed in processes) == num_tokens
    assert max(num_computed for *_, num_computed in processes) < num_tokens
    for metrics, found, _ in processes:
        assert metrics == pytest.approx(expected_metrics, rel=1e-9)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)


def without_one(how: str, missing: int) -> str:
    """What a process is told while one hangs, is killed in an update, or ended long ago."""
    learner = make_learner(num_minibatches=1, max_tokens_per_micro_batch=60)
    all_gather([0])
    set_deadline(5)
    if process_index() == missing:
        if how == "hangs":
            time.sleep(10)
            return ""
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        with naming_absent_ranks():
            for version in range(1000):
                learner.update(*credited([4, 3]), version=version)
                if how == "is killed in an update" and process_index() == missing and version == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
    except TrainingError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "missing"), first_quick([("is killed in an update", 2), ("hangs", 0), ("hangs", 2), ("is killed", 0)])
)
def test_a_process_that_is_missing_is_named_within_the_deadline(how: str, missing: int, tmp_path: Path) -> None:
    told = together(3, tmp_path, without_one, how, missing)
    for index, answer in enumerate(told):
        if index == missing:
            continue
        assert answer == (
            f"process {missing} of 3 has ended, or did not answer within train.process_timeout_s: 5; see what it said. "
            "The last checkpoint is whole"
        )
