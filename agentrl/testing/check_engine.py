"""Promises of every engine, as one call: `await check_engine(engine, vocab_size=...)`."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.errors import CheckError, EngineError
from agentrl.types import Completion, FinishReason, Sampling

if TYPE_CHECKING:
    import torch

    from agentrl.engine import Engine

Reference = Callable[[Sequence[int], Sequence[int], float], Sequence[float]]
"""Prompt, tokens, temperature -> natural-log probability of each token."""
Weights = Mapping[str, "torch.Tensor"]

_T = TypeVar("_T")
_TEMPERATURES = (0.6, 1.0, 1.5)
_NUM_TOKENS = 24
_PAUSES_AT = (0.5, 0.25, 0.75, 0.1, 0.02, 0.9)
"""Times of interrupts, as fractions of the time that the whole takes; the first that catches a request is enough."""


async def check_engine(
    engine: "Engine",
    reference_logprobs: Reference | None = None,
    *,
    vocab_size: int,
    weights: tuple[Weights, Weights] | None = None,
    bound: float = 1e-4,
    timeout_s: float = 60.0,
) -> None:
    """Raise with all that is wrong with an engine; return if nothing is.

    The engine must be idle, and its model's distribution not all but certain. With `weights` it holds the first set
    again at the end, under a higher version. A cache that conversations share is proven fresh only by a reference.

    Args:
        engine: what to check.
        reference_logprobs: what the log-probabilities must be. None: they are only compared with each other.
        vocab_size: number of tokens; prompts are made up from 0 to `vocab_size - 1`.
        weights: the weights that the engine holds, and others that differ visibly. None: pushes are not checked.
        bound: largest difference of two natural-log probabilities that should be equal.
        timeout_s: deadline of each wait, in seconds.

    Raises:
        CheckError: one line for each thing that is wrong.
    """
    subject = _Subject(
        engine=engine,
        reference=reference_logprobs,
        vocab_size=vocab_size,
        weights=weights,
        bound=bound,
        timeout_s=timeout_s,
    )
    checks = [_completions, _logprobs, _stops, _seeds, _company, _turns, _cancellation, _pause, _hold]
    checks += [_wrong_weights, _busy, _pushes] if weights else []
    problems: list[str] = []
    for check in checks:
        try:
            problems.extend([line async for line in check(subject)])
        except TimeoutError:
            problems.append(f"an engine call of the check {check.__name__[1:]!r} did not return within {timeout_s:g} s")
            break  # whatever hangs now would hang the rest
        except Exception as error:  # noqa: BLE001 - whatever a stranger's engine raises belongs in the list
            problems.append(f"{type(error).__name__} in the check {check.__name__[1:]!r}: {error}")
    if problems:
        lines = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
        raise CheckError(f"engine {type(engine).__name__}:{lines}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The engine under test, and how to ask it."""

    engine: "Engine"
    reference: Reference | None
    vocab_size: int
    weights: tuple[Weights, Weights] | None
    bound: float
    timeout_s: float

    def prompt(self, number: int, length: int = 9) -> list[int]:
        """Make up a prompt; each number gives another."""
        return [(number * 7 + position * (3 + number)) % self.vocab_size for position in range(length)]

    async def wait(self, awaitable: Coroutine[Any, Any, _T]) -> _T:
        async with asyncio.timeout(self.timeout_s):
            return await awaitable

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        return await self.wait(self.engine.generate(prompt_ids, sampling, request_id))

    async def ask_all(self, requests: Mapping[str, tuple[list[int], Sampling]]) -> dict[str, Completion]:
        found = await asyncio.gather(*(self.ask(prompt, sampling, key) for key, (prompt, sampling) in requests.items()))
        return dict(zip(requests, found, strict=True))

    def batch(self, num_tokens: int) -> dict[str, tuple[list[int], Sampling]]:
        """Return requests of several lengths, temperatures and seeds."""
        return {
            f"batch-{n}": (
                self.prompt(n, length=3 + 5 * n),
                _sampling(num_tokens - n, temperature=_TEMPERATURES[n % 3], seed=n),
            )
            for n in range(5)
        }

    def differs(self, logprobs: Sequence[float], expected: Sequence[float]) -> float | None:
        """Return the largest difference where it is beyond the bound."""
        if len(logprobs) != len(expected):
            return math.inf
        worst = max((abs(a - b) for a, b in zip(logprobs, expected, strict=True)), default=0.0)
        return None if worst <= self.bound else worst

    def is_same(self, completion: Completion, expected: Completion) -> bool:
        return (
            completion.token_ids == expected.token_ids
            and completion.finish_reason is expected.finish_reason
            and self.differs(completion.logprobs, expected.logprobs) is None
        )


def _sampling(max_tokens: int = _NUM_TOKENS, *, temperature: float = 1.0, seed: int = 0, stops: Any = ()) -> Sampling:
    return Sampling(max_tokens=max_tokens, stop_token_ids=tuple(stops), temperature=temperature, seed=seed)


async def _completions(subject: _Subject) -> AsyncIterator[str]:
    """Each completion is whole, within its budget, and has a version and a log-probability for each token."""
    busy_s = subject.engine.busy_s
    for key, (prompt, sampling) in subject.batch(_NUM_TOKENS).items():
        for num in (1, sampling.max_tokens):
            done = await subject.ask(prompt, replace(sampling, max_tokens=num), key)
            if len(done.token_ids) != num:
                yield f"a budget of {num} tokens and no stop token gives {len(done.token_ids)} tokens"
            if done.finish_reason is not FinishReason.LENGTH:
                yield f"a spent budget is reported as {done.finish_reason!r}, not 'length'"
            if not len(done.logprobs) == len(done.versions) == len(done.token_ids):
                yield f"{len(done.token_ids)} tokens come with {len(done.logprobs)} logprobs, {len(done.versions)} versions"
            if not all(0 <= token < subject.vocab_size for token in done.token_ids):
                yield f"a sampled token is outside 0..{subject.vocab_size - 1}"
            if not all(math.isfinite(logprob) and logprob <= 0 for logprob in done.logprobs):
                yield "a log-probability is above 0 or not finite"
            if set(done.versions) != {subject.engine.version}:
                yield f"tokens of version {subject.engine.version} are reported as {sorted(set(done.versions))}"
    if not subject.engine.busy_s >= busy_s >= 0:
        yield f"busy_s went from {busy_s} to {subject.engine.busy_s}: it must never fall"


async def _logprobs(subject: _Subject) -> AsyncIterator[str]:
    """Invariant 5."""
    prompt = subject.prompt(1)
    for temperature in _TEMPERATURES:
        done = await subject.ask(prompt, _sampling(temperature=temperature, seed=3), f"at-{temperature}")
        if subject.reference is not None:
            expected = subject.reference(prompt, done.token_ids, temperature)
            if (worst := subject.differs(done.logprobs, expected)) is not None:
                yield f"at temperature {temperature} log-probabilities differ from the reference by up to {worst:.3g}"
    greedy = [await subject.ask(prompt, _sampling(temperature=0.0, seed=s), f"greedy-{s}") for s in range(2)]
    if greedy[0].token_ids != greedy[1].token_ids:
        yield "at temperature 0 the seed changes the tokens"
    if any(greedy[0].logprobs):
        yield "at temperature 0 log-probabilities are not 0"


async def _stops(subject: _Subject) -> AsyncIterator[str]:
    """Each of several stop tokens ends a completion, at its first place, and stays."""
    prompt = subject.prompt(2)
    tokens = (await subject.ask(prompt, _sampling(seed=5), "free")).token_ids
    firsts = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
    early, late = firsts[len(firsts) // 2], firsts[-1]
    unused = next((t for t in range(subject.vocab_size) if t not in tokens), tokens[late])
    for stops in ((tokens[early],), (unused, tokens[late], tokens[early]), (tokens[early], tokens[late])):
        done = await subject.ask(prompt, _sampling(seed=5, stops=stops), "stopped")
        if done.token_ids != tokens[: early + 1]:
            yield (
                f"with {len(stops)} stop token(s), the first of which comes as token {early + 1}, {len(done.token_ids)} "
                "tokens are returned: it must end the completion and be its last token"
            )
        elif done.finish_reason is not FinishReason.STOP:
            yield f"a sampled stop token is reported as {done.finish_reason!r}, not 'stop'"
    done = await subject.ask(prompt, _sampling(early + 1, seed=5, stops=(tokens[early],)), "both")
    if done.finish_reason is not FinishReason.STOP:
        yield f"a stop token that is also the last of the budget is reported as {done.finish_reason!r}, not 'stop'"


async def _seeds(subject: _Subject) -> AsyncIterator[str]:
    prompt = subject.prompt(3)
    found = [
        (await subject.ask(prompt, _sampling(temperature=1.5, seed=s), "seeds")).token_ids for s in (0, 1, 2, 3, 0)
    ]
    if found[0] != found[-1]:
        yield "the same prompt, weights and seed give different tokens"
    if len(set(found)) == 1:
        yield "different seeds give the same tokens"


async def _company(subject: _Subject) -> AsyncIterator[str]:
    """A request answers as it does alone, whatever is decoded beside it."""
    requests = subject.batch(_NUM_TOKENS)
    alone = {key: await subject.ask(*request, key) for key, request in requests.items()}
    for key, done in (await subject.ask_all(requests)).items():
        if done.token_ids != alone[key].token_ids:
            yield "a request gives other tokens in company than alone"
        elif not subject.is_same(done, alone[key]):
            yield "a request has other log-probabilities in company than alone"


async def _turns(subject: _Subject) -> AsyncIterator[str]:
    """State kept from turn to turn changes nothing."""
    context = subject.prompt(4)
    with subject.engine.conversation("turns"):
        for turn in range(4):
            sampling = _sampling(6, temperature=_TEMPERATURES[turn % 3], seed=turn)
            done = await subject.ask(context, sampling, "turns")
            if subject.reference is not None:
                expected = subject.reference(context, done.token_ids, sampling.temperature)
                if (worst := subject.differs(done.logprobs, expected)) is not None:
                    yield f"on turn {turn + 1} of a conversation log-probabilities differ by {worst:.3g} from the reference"
            context = [*context, *done.token_ids, *subject.prompt(5 + turn, length=3)]
        kept = await subject.ask(context, _sampling(6, seed=9), "turns")
        other = await subject.ask(context[:-3], _sampling(6, seed=9), "turns")  # a context that was taken back
    for what, prompt, done in (("", context, kept), (", shortened,", context[:-3], other)):
        with subject.engine.conversation(f"fresh{what}"):
            if not subject.is_same(done, await subject.ask(prompt, _sampling(6, seed=9), f"fresh{what}")):
                yield f"the context of a conversation{what} answers otherwise than the same tokens as a fresh prompt"


async def _cancellation(subject: _Subject) -> AsyncIterator[str]:
    """A caller that goes away leaves nothing behind."""
    prompt, sampling = subject.prompt(6), _sampling(seed=2)
    alone = await subject.ask(prompt, sampling, "cancelled")
    task = asyncio.create_task(subject.engine.generate(prompt, replace(sampling, max_tokens=512), "cancelled"))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    try:
        if not subject.is_same(await subject.ask(prompt, sampling, "cancelled"), alone):
            yield "after a cancelled request the same id answers otherwise"
    except EngineError as error:
        yield f"after a cancelled request the same id is refused: {error}"


async def _pause(subject: _Subject) -> AsyncIterator[str]:
    """Invariant 7."""
    requests = subject.batch(4 * _NUM_TOKENS)
    begin = time.perf_counter()
    whole = await subject.ask_all(requests)
    whole_s = time.perf_counter() - begin
    num_partial = 0
    for share in _PAUSES_AT:
        tasks = {key: asyncio.create_task(_persist(subject, *request, key)) for key, request in requests.items()}
        for pause_s in (share * whole_s, 0.1 * whole_s):
            await asyncio.sleep(pause_s)
            await subject.wait(subject.engine.pause())
            await asyncio.sleep(0)
            await subject.wait(subject.engine.resume())
        async with asyncio.timeout(subject.timeout_s):
            parts = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        num_partial += sum(len(found) > 1 for found in parts.values())
        if any(not part.token_ids for found in parts.values() for part in found[:-1]):
            yield "an aborted completion is empty: a request that has not started is held, not returned"
        for key, found in parts.items():
            if not subject.is_same(_joined(found), whole[key]):
                yield "a request that was paused and resumed differs from the uninterrupted one"
        if num_partial:
            return
    yield "pause() never returned a running request with finish_reason 'aborted'"


async def _persist(
    subject: _Subject, prompt_ids: Sequence[int], sampling: Sampling, request_id: str
) -> list[Completion]:
    """Continue from prompt and partial completion until it is whole."""
    parts: list[Completion] = []
    while not parts or parts[-1].finish_reason is FinishReason.ABORTED:
        done = [token for part in parts for token in part.token_ids]
        rest = replace(sampling, max_tokens=sampling.max_tokens - len(done), drawn=len(done))
        parts.append(await subject.engine.generate([*prompt_ids, *done], rest, request_id))
    return parts


def _joined(parts: Sequence[Completion]) -> Completion:
    return Completion(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(version for part in parts for version in part.versions),
        finish_reason=parts[-1].finish_reason,
    )


async def _hold(subject: _Subject) -> AsyncIterator[str]:
    """Nothing is sampled between pause and resume."""
    prompt, sampling = subject.prompt(8), _sampling(4)
    begin = time.perf_counter()
    alone = await subject.ask(prompt, sampling, "held")
    alone_s = time.perf_counter() - begin
    await subject.wait(subject.engine.pause())
    task = asyncio.create_task(subject.ask(prompt, sampling, "held"))
    await asyncio.sleep(2 * alone_s + 0.01)
    if task.done():
        yield "a request that comes while the engine is paused is not held until resume()"
    await subject.wait(subject.engine.resume())
    if not subject.is_same(await task, alone):
        yield "a request that was held during a pause answers otherwise"


async def _wrong_weights(subject: _Subject) -> AsyncIterator[str]:
    """Weights that are not the model's are refused, and are no new version."""
    assert subject.weights is not None
    version = subject.engine.version
    name, tensor = next(iter(subject.weights[0].items()))
    for what, wrong in (
        ("an unknown name", ("no.such.weight", tensor)),
        ("another shape", (name, tensor.reshape(-1)[:-1])),
    ):
        try:
            await subject.wait(subject.engine.load_weights([wrong], version + 1))
        except EngineError as error:
            if wrong[0] not in str(error):
                yield f"load_weights with {what} does not name the weight: {error}"
        else:
            yield f"load_weights takes a weight with {what}: it must raise EngineError"
        if subject.engine.version != version:
            yield f"a refused push of {what} changes the version"
            version = subject.engine.version


async def _busy(subject: _Subject) -> AsyncIterator[str]:
    """A push while requests are running is refused."""
    assert subject.weights is not None
    sampling = _sampling(4 * _NUM_TOKENS)
    begin = time.perf_counter()
    await subject.ask(subject.prompt(9), sampling, "busy")
    whole_s = time.perf_counter() - begin
    for share in _PAUSES_AT:
        task = asyncio.create_task(subject.ask(subject.prompt(9), sampling, "busy"))
        await asyncio.sleep(share * whole_s)
        was_running, is_refused = not task.done(), False
        try:
            await subject.wait(subject.engine.load_weights(subject.weights[0].items(), subject.engine.version + 1))
        except EngineError:
            is_refused = True
        # One that had ended by then proves nothing; its task may not know it yet.
        was_running &= not (await asyncio.wait({task}, timeout=0.1 * whole_s))[0]
        await task
        if is_refused:
            return
        if was_running:
            yield "load_weights replaces the weights under a running request: it must raise EngineError"
            return


async def _pushes(subject: _Subject) -> AsyncIterator[str]:
    """Invariant 6: a prompt known from before the push, in an open conversation, is answered as by a fresh engine."""
    assert subject.weights is not None
    early = subject.prompt(10, 40)
    late = subject.prompt(11, 40)
    sampling = _sampling(8, seed=4)
    # `early` is first seen under the first weights, `late` under the second.
    plan = (None, (early,)), (subject.weights[1], (early, late)), (subject.weights[0], (late, early))
    before: dict[tuple[int, ...], Completion] = {}
    version = subject.engine.version
    with subject.engine.conversation("kept"):
        for weights, prompts in plan:
            if weights is not None:
                version += 3
                await subject.wait(subject.engine.load_weights(weights.items(), version))
                if subject.engine.version != version:
                    yield f"after a push of version {version} the engine reports version {subject.engine.version}"
            for prompt in prompts:
                found = await subject.ask_all(
                    {"kept": (prompt, sampling), f"fresh-{version}-{len(before)}": (prompt, sampling)}
                )
                done, fresh = found.values()
                if set(done.versions) != {version}:
                    yield f"tokens sampled by version {version} are recorded as {sorted(set(done.versions))}"
                if not subject.is_same(done, fresh):
                    yield "a prompt that is repeated after a push answers otherwise than a fresh one"
                if tuple(prompt) in before and before[tuple(prompt)].logprobs == done.logprobs:
                    yield "a push does not change how a known prompt is answered: weights or cache are stale"
                before[tuple(prompt)] = done
                if subject.reference is not None and weights is not subject.weights[1]:
                    expected = subject.reference(prompt, done.token_ids, sampling.temperature)
                    if (worst := subject.differs(done.logprobs, expected)) is not None:
                        yield f"after a push log-probabilities differ from the reference by up to {worst:.3g}"
