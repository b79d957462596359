"""Weight sync from the learner to the engine, and the proof that the engine samples from the synced weights."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from agentrl.distributed.processes import all_gather, from_rank_zero, num_processes
from agentrl.engine.base import AdapterEngine, KeptBase, ReplicatedEngine, SharedEngine
from agentrl.errors import EngineError
from agentrl.learn.config import TrainConfig
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.rollout import RolloutPool
from agentrl.types import Completion, Message, Sampling

T = TypeVar("T")
_USER: Message = {"role": "user", "content": "Tell me a story."}
_NUM_TOKENS = 32


class Sample(NamedTuple):
    """Tokens that an engine sampled for comparison."""

    prompt_ids: list[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def sampled_by_all(
    pool: RolloutPool, state: PolicyState, runner: asyncio.Runner, sampling: Coroutine[Any, Any, list[T]]
) -> list[T]:
    """Sample on this rank's engine, while the other ranks sample on theirs; return the samples of all ranks.

    Episodes that a step interrupted continue meanwhile. The engine is paused while other ranks are waited for, so that no
    deadline passes; it stays paused if episodes wait for the next step.
    """
    waits_for_others, continues = num_processes() > 1, pool.context.config.samples_during_update
    with state.sampling():
        runner.run(pool.resume())
        sampled = runner.run(sampling)
        if waits_for_others or not continues:
            runner.run(pool.freeze())
    sampled = all_gather(sampled)
    if waits_for_others and continues:
        runner.run(pool.resume())
    return sampled


class WeightSync:
    """Syncs weights to the engine, and compares its log-probabilities with the learner's. All ranks make the same calls."""

    def __init__(
        self,
        pool: RolloutPool,
        learner: Learner,
        *,
        runner: asyncio.Runner,
        seed: int,
        config: TrainConfig,
        overrides: Mapping[str, Any] = MappingProxyType({}),
        merges_into: torch.dtype | None = None,
    ) -> None:
        """Take the parts.

        Args:
            pool: plays episodes on the engine; paused while weights are replaced.
            learner: holds the weights.
            runner: event loop on which pool and engine live.
            seed: seed of the tokens that are sampled for comparison.
            config: holds the largest difference of log-probabilities (`train.agreement`).
            overrides: fields of the recipe that may make the engine compute something else, and their values.
            merges_into: dtype of merged weights, for a metric, if adapters are merged whatever is lost
                (`model.lora.merge`); an engine that has a `dtype` knows better.
        """
        self._pool = pool
        self._learner = learner
        self._runner = runner
        self._seed = seed
        self._config = config
        self._overrides = overrides
        self._merges_into = merges_into
        self.bound = config.agreement_bound()
        """Largest difference of log-probabilities, in nats."""

    def verify_and_push(self, version: int) -> float:
        """Sync the weights as `version`, and prove that the engine samples from them.

        On text that it samples, the engine's log-probabilities must equal the learner's, and differ once the weights, or the
        adapters of an engine that takes them, are perturbed.

        Returns:
            Mean difference of log-probabilities under the same weights, in nats.

        Raises:
            EngineError: with the difference and the bound.
        """
        # Wrong weights on purpose: rows are rotated, so that the probability of one token becomes that of another.
        perturbed = ((name, tensor.roll(1, 0) if tensor.ndim > 1 else tensor) for name, tensor in self._weights())
        self._load(perturbed, version)
        # After random tokens: in text of its own, a policy that is sure of it may go on under other weights too.
        vocab_size = self._learner.state.policy.model.config.get_text_config().vocab_size
        random_ids = np.random.default_rng(self._seed).integers(vocab_size, size=_NUM_TOKENS // 2).tolist()
        least = min(self._differences(self.samples(random_ids)))
        if self._push_adapters(version, is_perturbed=True):
            least = min(least, *self._differences(self.samples(random_ids)))
        self.push(version)
        samples = self.samples()
        found = max(self._differences(samples))
        self.bound = self._config.agreement_bound(max(self._learner.rounding_error(*sample[:2]) for sample in samples))
        if not least > self.bound:
            raise EngineError(
                "weights pushed to the engine do not reach its samples: after a perturbation its log-probabilities still "
                f"agree with the trainer's to {least:.2e} nats (train.agreement: {self.bound:g})"
            )
        self.check_agreement(found)
        return found

    def push(self, version: int) -> dict[str, float]:
        """Sync the weights to the engine, as `version`: the adapters alone if every rank's engine has the base weights.

        Returns:
            Metrics.
        """
        state, engine = self._learner.state, self._pool.context.engine
        if not self._push_adapters(version):
            self._load(self._weights(), version)
        if self._merges_into is None:
            return {}
        dtype = getattr(engine, "dtype", None) or self._merges_into
        return {"mismatch/lost_change": state.lost_change(dtype)}

    def _push_adapters(self, version: int, *, is_perturbed: bool = False) -> bool:
        """Sync adapters, perturbed ones if asked; return whether the engines take adapters."""
        state, engine = self._learner.state, self._pool.context.engine
        if not state.has_adapters:
            return False
        mine = self._runner.run(engine.kept_base()) if isinstance(engine, AdapterEngine) else KeptBase.IMPOSSIBLE
        kept = min(all_gather([mine]))
        if kept is KeptBase.IMPOSSIBLE:
            return False
        base = None if kept is KeptBase.THERE else state.base_weights()
        changes = state.weight_changes()
        if is_perturbed:
            changes = ((name, _perturbed(left, right)) for name, (left, right) in changes)

        async def load() -> None:
            assert isinstance(engine, AdapterEngine)
            await self._pool.freeze()
            await engine.load_adapters(changes, base, version)

        self._runner.run(load())
        self._follow(version)
        return True

    def check_samples(self) -> None:
        """Sample a few tokens, and compare their log-probabilities with the learner's.

        Raises:
            EngineError: if they differ by more than the bound.
        """
        self.check_agreement(max(self._differences(self.samples())))

    def check_agreement(self, found: float) -> None:
        """Check a mean difference of log-probabilities under the same weights, in nats.

        Raises:
            EngineError: if it is beyond the bound.
        """
        if not found <= self.bound:  # also true for nan
            listed = ", ".join(f"{field}: {value}" for field, value in self._overrides.items())
            cause = (
                f"{listed} may cause it: remove it"
                if listed
                else "The engine runs another model than the trainer, or in a coarser precision: then raise it"
            )
            raise EngineError(
                f"the engine's log-probabilities differ from the trainer's by {found:.2e} nats on average under the same "
                f"weights, more than train.agreement: {self.bound:g}. {cause}"
            )

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the weights to sync: whole on rank 0 alone, if it alone replaces them and they are sharded."""
        state = self._learner.state
        if not state.is_sharded:
            return state.weights()
        own = [getattr(self._pool.context.engine, "dtype", None)] if self._has_weights else []
        dtypes = all_gather(own)
        return state.weights_for(0, dtypes[0]) if len(dtypes) == 1 else state.weights()

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights into the engine, which is paused meanwhile."""

        async def load() -> None:
            await self._pool.freeze()
            await self._pool.context.engine.load_weights(weights, version)

        self._runner.run(load())
        self._follow(version)

    def _follow(self, version: int) -> None:
        """Wait for the rank that replaced the weights of a shared engine, and take over which copies have them."""
        engine = self._pool.context.engine
        copies = from_rank_zero(lambda: engine.copies() if isinstance(engine, SharedEngine) else {})
        if isinstance(engine, SharedEngine) and not engine.syncs:
            self._runner.run(engine.follow(copies, version))

    @property
    def _has_weights(self) -> bool:
        """True if weights are replaced by this rank: it has an engine, of its own or one that it shares and syncs."""
        engine = self._pool.context.engine
        return bool(self._pool.shard.num_groups) and (not isinstance(engine, SharedEngine) or engine.syncs)

    def samples(self, prompt: Sequence[int] | None = None) -> list[Sample]:
        """Sample some text from each rank's engine, after a prompt or (None) after a user's question, as in a run."""
        rollout = self._pool.context.config
        num = min(_NUM_TOKENS, max(1, rollout.max_context_tokens // 2))
        prompt = self._pool.context.renderer.start([_USER], ()) if prompt is None else prompt
        prompt = list(prompt[num - rollout.max_context_tokens :])
        sampling = Sampling(max_tokens=num, stop_token_ids=(), temperature=rollout.temperature, seed=self._seed)
        completions = sampled_by_all(self._pool, self._learner.state, self._runner, self._sample(prompt, sampling))
        return [Sample(prompt, completion.token_ids, completion.logprobs) for completion in completions]

    def _differences(self, samples: Iterable[Sample]) -> list[float]:
        """Return the mean difference of each sample's log-probabilities to the learner's, in nats."""
        found = []
        for sample in samples:
            logprobs_T = self._learner.logprobs(sample.prompt_ids, sample.token_ids)
            found.append(float((logprobs_T.cpu() - torch.tensor(sample.logprobs)).abs().mean()))
        return found

    async def _sample(self, prompt: list[int], sampling: Sampling) -> list[Completion]:
        """Sample after a prompt, if this rank replaces weights."""
        if not self._has_weights:
            return []
        engine, rollout = self._pool.context.engine, self._pool.context.config
        try:
            async with asyncio.timeout(rollout.engine_timeout_s):
                if isinstance(engine, ReplicatedEngine):
                    return await engine.generate_on_each(prompt, sampling, "self-proof")
                with engine.conversation("self-proof"):
                    return [await engine.generate(prompt, sampling, "self-proof")]
        except TimeoutError:
            raise EngineError(
                f"the engine did not answer its self-proof within rollout.engine_timeout_s: {rollout.engine_timeout_s:g}"
            ) from None


def _perturbed(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return other matrices of a low-rank change. One of them is 0 before the first update."""
    rows, columns = (torch.linspace(-1, 1, size, device=left.device) for size in (left.shape[0], right.shape[1]))
    return left + rows[:, None], right + columns
