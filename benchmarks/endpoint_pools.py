"""Pools whose episodes are played by programs against an engine that says messages, for the benchmarks of the endpoint."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl.agent.config import AgentConfig
from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.learn.tokens import TokenBatch
from agentrl.rollout import EpisodeContext, Journal, Player, RolloutConfig, RolloutPool, Tasks
from agentrl.rollout.agent_episode import AgentPlayer
from agentrl.testing.scripted_engine import ScriptedEngine
from agentrl.types import Completion, FinishReason, Message, NumTasks, Sampling, Trajectory, context_of

TOKENIZER = train_tokenizer([], vocab_size=261)
"""One token a byte."""
RENDERER = ChatMLRenderer(TOKENIZER)


def decode(ids: Sequence[int]) -> str:
    """Return the text of tokens, marks included."""
    return str(TOKENIZER.backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def text(words: str) -> Message:
    """Return a message of the policy."""
    return {"role": "assistant", "content": words}


class MessageEngine(ScriptedEngine):
    """Says messages, as tokens, and keeps each completion with the prompt that it follows."""

    def __init__(self, say: Callable[[str, str], Message], *, seconds: float = 0.0, token_s: float = 0.0) -> None:
        """Take what to say.

        Args:
            say: returns the message for a request id and the text of its prompt.
            seconds: time before the first token of each completion.
            token_s: time of each token.
        """
        super().__init__(lambda name, _: RENDERER.encode(say(name, decode(self.prompts[name][-1]))), token_s=token_s)
        self._seconds = seconds
        self.said: list[tuple[tuple[int, ...], Completion]] = []
        self.begun: Counter[str] = Counter()
        """Actions begun, by trajectory id. An interrupted one is begun once, and again if what follows is cancelled."""
        self.interrupted: set[str] = set()
        """Trajectories whose newest action a pause has interrupted."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Say the next message."""
        self.begun[trajectory_id(request_id)] += sampling.drawn == 0
        if self._seconds:
            await asyncio.sleep(self._seconds)
        try:
            completion = await super().generate(prompt_ids, sampling, request_id)
        except asyncio.CancelledError:
            self.begun[trajectory_id(request_id)] += sampling.drawn > 0
            raise
        self.said.append((tuple(prompt_ids), completion))
        is_interrupted = completion.finish_reason is FinishReason.ABORTED
        (self.interrupted.add if is_interrupted else self.interrupted.discard)(trajectory_id(request_id))
        return completion


@contextmanager
def open_pool(
    player: Player, engine: MessageEngine, *, journal: Journal | None = None, num_tasks: int = 1, **rollout: Any
) -> Iterator[tuple[asyncio.Runner, RolloutPool]]:
    """Open a pool, and the event loop that it runs on."""
    settings = {"max_turns": 100_000, "max_turn_tokens": 1000, "max_episode_tokens": 10**8, "max_context_tokens": 10**6}
    config = RolloutConfig.model_validate(settings | rollout)
    context = EpisodeContext(engine=engine, renderer=RENDERER, config=config, decode=decode)
    tasks = Tasks(seed=0, num=NumTasks(train=num_tasks, eval=0))
    pool = RolloutPool(player=player, context=context, tasks=tasks, journal=journal)
    with asyncio.Runner() as runner:
        try:
            yield runner, pool
        finally:
            runner.run(pool.stop())
            pool.close()


def trajectory_id(request_id: str) -> str:
    """Return the episode that a request of the engine belongs to."""
    return request_id.partition("#")[0]


def agent_player(agent: Mapping[str, Any], *, on_warning: Callable[[str], object] = lambda _: None) -> AgentPlayer:
    """Return the player of a section `agent`."""
    return AgentPlayer(AgentConfig.model_validate(agent), on_warning=on_warning)


def sampled(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return context and action of each turn, sorted."""
    turns = trajectory.turns
    return sorted((context_of(turns, number), turn.action_ids) for number, turn in enumerate(turns))


def num_trained(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of tokens that the loss selects, each in its context."""
    return len(TokenBatch.from_trajectories(trajectories))
