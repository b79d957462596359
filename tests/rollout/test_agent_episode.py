"""Episodes that a program plays through the endpoint, met by programs that do what programs do."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.config import AgentConfig
from agentrl.chat import ChatMLRenderer
from agentrl.errors import EngineError
from agentrl.recipe.registry import spec_of
from agentrl.rollout import EpisodeContext, Journal, LiveEpisode, RolloutConfig, RolloutPool, Tasks
from agentrl.rollout.agent_episode import AgentPlayer
from agentrl.rollout.player import Listeners
from agentrl.testing import ScriptedEngine
from agentrl.types import Completion, FinishReason, Sampling, StopReason, Trajectory, chains_of, context_of

openai: Any = pytest.importorskip("openai", reason="comes with the extra of vLLM")

ROWS = [{"question": f"q{number}", "answer": "yes"} for number in range(8)]
Answers = Callable[[str], str]


class TalkingEngine(ScriptedEngine):
    """Answers the last message of each prompt with a text, by a function of its text."""

    def __init__(self, renderer: ChatMLRenderer, tokenizer: Any, answers: Answers) -> None:
        super().__init__(lambda _, __: [])
        self.decode = lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
        self.held: dict[str, asyncio.Event] = {}
        """Answers to these texts wait."""
        self.fails_at = ""
        self.num_sampled = 0
        self.asked: list[str] = []
        self._renderer, self._answers = renderer, answers

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        text = self.decode(prompt_ids).rpartition("user\n")[2].partition("<|im_end|>")[0]
        if text == self.fails_at:
            self.fails_at = ""
            raise EngineError("gone")
        if text in self.held:
            await self.held[text].wait()
        self.asked.append(text)
        completion = await super().generate(prompt_ids, sampling, request_id)
        self.num_sampled += len(completion.token_ids)
        return completion

    def _next(self, request_id: str) -> list[int]:
        answer = self._answers(self.asked[-1])
        return list(self._renderer.encode({"role": "assistant", "content": answer}))


class Table:
    """A pool whose episodes a function plays."""

    def __init__(
        self,
        renderer: ChatMLRenderer,
        tokenizer: Any,
        function: Callable[..., Any],
        answers: Answers = lambda text: f"to {text}",
        *,
        rollout: dict[str, Any] | None = None,
        journal: Journal | None = None,
        **agent: Any,
    ) -> None:
        self.engine = TalkingEngine(renderer, tokenizer, answers)
        settings = {
            "num_groups": 1,
            "group_size": 2,
            "max_turn_tokens": 64,
            "max_context_tokens": 512,
            "max_retries": 1,
        }
        config = RolloutConfig.model_validate({**settings, **(rollout or {})})
        given = {"run": spec_of(function), "tasks": {"tasks": ROWS, "eval_share": 0}, **agent}
        self.warnings: list[str] = []
        self.player = AgentPlayer(AgentConfig.model_validate(given), on_warning=self.warnings.append)
        context = EpisodeContext(engine=self.engine, renderer=renderer, config=config, decode=self.engine.decode)
        self.faults: list[Trajectory] = []
        self.pool = RolloutPool(
            player=self.player,
            context=context,
            tasks=Tasks(seed=5),
            journal=journal,
            on_fault=self.faults.append,
        )

    async def episodes(self) -> Sequence[Trajectory]:
        async with asyncio.timeout(60):
            (group,) = await self.pool.collect()
        return group.trajectories


@pytest.fixture
def new_table(rarely_stopping_renderer: ChatMLRenderer, tokenizer: Any) -> Iterator[Callable[..., Table]]:
    tables: list[Table] = []

    def make(function: Callable[..., Any], **options: Any) -> Table:
        tables.append(table := Table(rarely_stopping_renderer, tokenizer, function, **options))
        return table

    yield make
    for table in tables:
        table.pool.close()


def client_of(session: Any) -> Any:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    response = await client.chat.completions.create(model="policy", messages=messages, **options)
    return response.choices[0].message


async def three_turns(task: dict[str, Any], session: Any) -> dict[str, float]:
    messages: list[Any] = [user(task["question"])]
    client = client_of(session)
    for number in range(3):
        messages += [await ask(client, messages), user(f"{number}")]
    return {"reward": 2.0, "success": 1.0, "steps": 3.0}


def text_of(trajectory: Trajectory, number: int, engine: TalkingEngine) -> str:
    turn = trajectory.turns[number]
    return engine.decode((*context_of(trajectory.turns, number), *turn.action_ids))


def test_the_calls_of_a_loop_are_turns_of_one_growing_context(new_table: Callable[..., Table]) -> None:
    table = new_table(three_turns)
    for trajectory in asyncio.run(table.episodes()):
        assert trajectory.stop_reason is StopReason.TERMINATED
        assert chains_of(trajectory.turns) == [[0, 1, 2]]
        assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 2.0]
        assert trajectory.metrics["success"] == 1.0
        assert trajectory.metrics["steps"] == 3.0
        assert trajectory.turns[2].observation == ({"role": "user", "content": "1"},)
        assert text_of(trajectory, 2, table.engine).endswith("user\n1<|im_end|>\n<|im_start|>assistant\nto 1<|im_end|>")
        sampled = {context: ids for ids in table.engine.prompts.values() for context in ids}
        assert {context_of(trajectory.turns, k) for k in range(3)} <= set(sampled)
    assert table.pool.counts["faults"] == 0


async def parallel(task: dict[str, Any], session: Any) -> float:
    client = client_of(session)
    opening = [user(task["question"])]
    first = await ask(client, opening)
    longer = [*opening, first]
    slow = asyncio.create_task(ask(client, [*longer, user("slow")]))
    await asyncio.sleep(0.3)
    quick = await ask(client, [*longer, user("quick")])
    session.reward(5.0)
    await ask(client, [*longer, user("quick"), quick, user("after")])
    other = await ask(client, [user("another line")])
    await slow
    assert other.content == "to another line"
    return 1.0


def test_calls_are_turns_in_the_order_in_which_they_were_asked(new_table: Callable[..., Table]) -> None:
    table = new_table(parallel, rollout={"group_size": 1})

    async def play() -> Trajectory:
        table.engine.held["slow"] = held = asyncio.Event()
        asyncio.get_running_loop().call_later(2.0, held.set)
        (trajectory,) = await table.episodes()
        return trajectory

    trajectory = asyncio.run(play())
    asked = [turn.observation[-1]["content"] for turn in trajectory.turns]
    assert asked == [asked[0], "slow", "quick", "after", "another line"]
    assert [turn.parent for turn in trajectory.turns] == [None, None, 0, None, None]
    assert chains_of(trajectory.turns) == [[0, 1], [2, 3], [4]]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 5.0, 0.0, 1.0]
    assert trajectory.metrics["forked_calls"] == 1.0
    assert trajectory.metrics["new_lines"] == 1.0
    assert text_of(trajectory, 3, table.engine).count("slow") == 0


def test_parameters_of_a_client_are_not_taken_over_and_named_once(new_table: Callable[..., Table]) -> None:
    async def hot(task: dict[str, Any], session: Any) -> float:
        await ask(client_of(session), [user(task["question"])], temperature=0.1, logit_bias={})
        return 0.0

    table = new_table(hot)
    first, _ = asyncio.run(table.episodes())
    assert first.turns[0].extras == {"dialect": "chat", "ignored": {"temperature": "0.1"}}
    assert len(table.warnings) == 1
    assert "temperature" in table.warnings[0]


def test_a_call_keeps_its_dialect_and_whether_it_was_streamed(new_table: Callable[..., Table]) -> None:
    async def streams(task: dict[str, Any], session: Any) -> float:
        client = client_of(session)
        async for _ in await client.chat.completions.create(
            model="policy", messages=[user(task["question"])], stream=True
        ):
            pass
        await client.responses.create(model="policy", input=task["question"])
        return 0.0

    first, _ = asyncio.run(new_table(streams).episodes())
    assert [turn.extras["dialect"] for turn in first.turns] == ["chat, streamed", "responses"]


def test_an_action_ends_with_the_token_that_completes_a_stop_string(new_table: Callable[..., Table]) -> None:
    shown: list[str] = []

    async def stops(task: dict[str, Any], session: Any) -> float:
        client = client_of(session)
        answer = await ask(client, [user(task["question"])], stop=["STOP", "never"])
        shown.append(answer.content)
        await ask(client, [user(task["question"]), {"role": "assistant", "content": answer.content}, user("on")])
        return 0.0

    table = new_table(stops, answers=lambda text: f"{text} bSTOPc")
    first, _ = asyncio.run(table.episodes())
    assert set(shown) == {f"{first.turns[0].observation[-1]['content']} b"}
    assert table.engine.decode(first.turns[0].action_ids).endswith(" bSTOP")
    assert first.turns[0].finish_reason is FinishReason.STOP
    assert chains_of(first.turns) == [[0, 1]]
    assert "bSTOP<|im_end|>" in text_of(first, 1, table.engine)


def test_limits_are_told_and_the_program_says_how_it_went(new_table: Callable[..., Table]) -> None:
    async def on_and_on(task: dict[str, Any], session: Any) -> float:
        client = client_of(session)
        messages: list[Any] = [user(task["question"])]
        for _ in range(9):
            try:
                messages += [await ask(client, messages), user("more")]
            except openai.APIStatusError as error:
                return 0.5 if "rollout.max_turns: 2" in str(error) else 0.25
        return 1.0

    table = new_table(on_and_on, rollout={"max_turns": 2})
    for trajectory in asyncio.run(table.episodes()):
        assert (trajectory.stop_reason, trajectory.truncated) == (StopReason.MAX_TURNS, True)
        assert trajectory.reward == 0.5
        assert len(trajectory.turns) == 2


def test_a_prompt_that_is_too_long_can_be_made_shorter(new_table: Callable[..., Table]) -> None:
    async def compacts(task: dict[str, Any], session: Any) -> float:
        client = client_of(session)
        await ask(client, [user(task["question"])])
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(client, [user("x" * 600)])
        await ask(client, [user("summary")])
        return 1.0

    for trajectory in asyncio.run(new_table(compacts, rollout={"max_turns": 2}).episodes()):
        assert [turn.observation[-1]["content"] for turn in trajectory.turns][1] == "summary"
        assert trajectory.reward == 1.0


def fails_with(*errors: Exception | None) -> Callable[..., Any]:
    """Return a program that asks twice and then raises, in each run of an episode the next of these."""
    runs: dict[str, int] = {}

    async def fragile(task: dict[str, Any], session: Any) -> float:
        number = runs[task["question"]] = runs.get(task["question"], -1) + 1
        client = client_of(session)
        first = await ask(client, [user(task["question"])])
        await ask(client, [user(task["question"]), first, user("on")])
        error = errors[min(number, len(errors) - 1)]
        if error is not None:
            raise error
        return 1.0

    return fragile


def test_the_same_failure_on_the_same_answers_is_a_result(new_table: Callable[..., Table]) -> None:
    function = fails_with(KeyError("price"))
    table = new_table(function, rollout={"group_size": 1})
    (trajectory,) = asyncio.run(table.episodes())
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert not trajectory.failed
    assert trajectory.reward == 0.0
    assert "KeyError" in str(trajectory.error)
    assert len(trajectory.turns) == len(table.engine.asked) == 2  # the second run got the recorded answers


def test_a_program_that_fails_once_is_run_again_on_the_same_answers(new_table: Callable[..., Table]) -> None:
    function = fails_with(KeyError("price"), None)
    table = new_table(function, rollout={"group_size": 1})
    (trajectory,) = asyncio.run(table.episodes())
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TERMINATED, 1.0)
    assert len(table.engine.asked) == 2
    assert not table.faults


def test_an_answer_that_a_failing_program_did_not_wait_for_is_there_for_its_next_run(
    new_table: Callable[..., Table],
) -> None:
    runs: list[int] = []

    async def leaves(task: dict[str, Any], session: Any) -> float:
        runs.append(1)
        asking = asyncio.create_task(ask(client_of(session), [user("slow")]))
        if len(runs) == 1:
            await asyncio.sleep(0.5)
            raise KeyError("price")
        await asking
        return 1.0

    table = new_table(leaves, rollout={"group_size": 1})

    async def play() -> Trajectory:
        table.engine.held["slow"] = held = asyncio.Event()
        asyncio.get_running_loop().call_later(1.5, held.set)
        (trajectory,) = await table.episodes()
        return trajectory

    assert asyncio.run(play()).reward == 1.0
    assert len(table.engine.asked) == 1


def test_another_failure_is_a_fault_and_the_episode_begins_again(new_table: Callable[..., Table]) -> None:
    function = fails_with(KeyError("price"), OSError("disk"), None)
    table = new_table(function, rollout={"group_size": 1})
    (trajectory,) = asyncio.run(table.episodes())
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TERMINATED, 1.0)
    assert ["OSError" in str(fault.error) for fault in table.faults] == [True]
    assert len(table.engine.asked) == 4


def test_a_program_that_hangs_is_given_up(new_table: Callable[..., Table]) -> None:
    async def hangs(task: dict[str, Any], session: Any) -> float:
        await ask(client_of(session), [user(task["question"])])
        await asyncio.sleep(1000)
        return 1.0

    table = new_table(hangs, rollout={"group_size": 1}, timeout_s=0.5)
    (trajectory,) = asyncio.run(table.episodes())
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert "agent.timeout_s: 0.5" in str(trajectory.error)


@pytest.mark.slow
def test_a_coroutine_that_blocks_is_told_to_be_a_function(new_table: Callable[..., Table]) -> None:
    async def blocks(task: dict[str, Any], session: Any) -> float:
        await ask(client_of(session), [user(task["question"])])
        time.sleep(4)
        return 1.0

    table = new_table(blocks, rollout={"group_size": 1}, timeout_s=0.5)
    (trajectory,) = asyncio.run(table.episodes())
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert "write it as `def`" in str(trajectory.error)


def test_a_slow_answer_is_no_silence(new_table: Callable[..., Table]) -> None:
    async def waits(task: dict[str, Any], session: Any) -> float:
        await ask(client_of(session), [user("slow")])
        return 1.0

    table = new_table(waits, rollout={"group_size": 1}, timeout_s=0.5)

    async def play() -> Trajectory:
        table.engine.held["slow"] = held = asyncio.Event()
        asyncio.get_running_loop().call_later(1.5, held.set)
        (trajectory,) = await table.episodes()
        return trajectory

    assert asyncio.run(play()).reward == 1.0


def test_a_function_without_async_has_a_thread_and_may_block(new_table: Callable[..., Table]) -> None:
    def blocks(task: dict[str, Any], session: Any) -> float:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        time.sleep(0.2)
        client.chat.completions.create(model="policy", messages=[user(task["question"])])
        return 1.0

    assert [t.reward for t in asyncio.run(new_table(blocks).episodes())] == [1.0, 1.0]


async def dies_once(task: dict[str, Any], session: Any) -> float:
    client = client_of(session)
    session.state("begin")
    first = await client.chat.completions.create(model="policy", messages=[user(task["question"])])
    with pytest.raises(Exception, match="no answer of this session"):
        session.reward(1.0, call="chatcmpl-17")
    session.reward(0.25, call=first.id)
    died = Path(task["died"])
    if not died.exists():
        died.touch()
        os._exit(7)
    return 1.0


@pytest.mark.slow
@pytest.mark.process
def test_a_process_of_functions_that_ends_costs_no_episode(new_table: Callable[..., Table], tmp_path: Path) -> None:
    rows = [{"question": f"q{number}", "died": str(tmp_path / f"{number}")} for number in range(2)]
    table = new_table(dies_once, tasks={"tasks": rows, "eval_share": 0}, processes=1, rollout={"group_size": 1})
    (trajectory,) = asyncio.run(table.episodes())
    assert [(turn.reward, turn.state_key) for turn in trajectory.turns] == [(1.25, "begin")]
    assert len(table.engine.asked) == 1
    assert not table.faults


def test_what_nothing_can_score_leaves_training(new_table: Callable[..., Table]) -> None:
    async def says_nothing(task: dict[str, Any], session: Any) -> None:
        await ask(client_of(session), [user(task["question"])])
        if task["question"] == "never":
            session.reward(1.0)

    table = new_table(says_nothing, rollout={"max_consecutive_failures": 1})
    with pytest.raises(Exception, match="nothing could score it"):
        asyncio.run(table.episodes())


def test_a_program_that_asks_nothing_is_told_to(new_table: Callable[..., Table]) -> None:
    async def sleeps(task: dict[str, Any], session: Any) -> float:
        return 1.0

    with pytest.raises(Exception, match="session\\.base_url"):
        asyncio.run(new_table(sleeps, rollout={"max_consecutive_failures": 2}).episodes())


def test_reward_functions_grade_the_last_answer(new_table: Callable[..., Table]) -> None:
    async def asks(task: dict[str, Any], session: Any) -> None:
        await ask(client_of(session), [user(task["question"])])

    table = new_table(
        asks,
        answers=lambda text: "yes" if text in ("q0", "q3") else "no",
        tasks={"tasks": ROWS, "answer": "answer", "eval_share": 0},
        reward="exact_match",
        rollout={"num_groups": 1, "group_size": 2},
    )
    for trajectory in asyncio.run(table.episodes()):
        is_right = trajectory.turns[0].observation[-1]["content"] in ("q0", "q3")
        assert trajectory.reward == trajectory.metrics["success"] == float(is_right)


def test_rewards_and_states_are_reported_for_single_calls(new_table: Callable[..., Table]) -> None:
    async def pays(task: dict[str, Any], session: Any) -> float:
        client = client_of(session)
        session.state("begin")
        first = await client.chat.completions.create(model="policy", messages=[user(task["question"])])
        session.state("end")
        await ask(client, [user(task["question"]), first.choices[0].message, user("on")])
        session.reward(0.25, call=first.id)
        session.reward(0.5)
        with pytest.raises(Exception, match="no answer of this session"):
            session.reward(1.0, call="chatcmpl-17")
        with pytest.raises(Exception, match="finite"):
            session.reward(float("nan"))
        return 1.0

    first, _ = asyncio.run(new_table(pays).episodes())
    assert [turn.reward for turn in first.turns] == [0.25, 1.5]
    assert [(turn.state_key, turn.next_state_key) for turn in first.turns] == [("begin", "end"), ("end", "end")]


def test_a_response_continues_the_one_that_it_names(new_table: Callable[..., Table]) -> None:
    async def responds(task: dict[str, Any], session: Any) -> float:
        client = client_of(session)
        first = await client.responses.create(model="policy", input=task["question"])
        second = await client.responses.create(model="policy", input="on", previous_response_id=first.id)
        return float(second.output_text == "to on")

    first, _ = asyncio.run(new_table(responds).episodes())
    assert first.reward == 1.0
    assert chains_of(first.turns) == [[0, 1]]


def test_after_a_failure_of_the_engine_no_answer_is_sampled_again(new_table: Callable[..., Table]) -> None:
    table = new_table(three_turns, rollout={"group_size": 1})
    table.engine.fails_at = "1"
    (trajectory,) = asyncio.run(table.episodes())
    assert len(trajectory.turns) == 3
    assert trajectory.reward == 2.0
    assert len(table.engine.asked) == 3
    assert table.engine.num_sampled == trajectory.num_action_tokens


def test_the_journal_restores_an_episode_with_its_late_rewards(new_table: Callable[..., Table], tmp_path: Path) -> None:
    table = new_table(parallel, rollout={"group_size": 1}, journal=Journal(tmp_path))
    table.pool.state_dict()
    (trajectory,) = asyncio.run(table.episodes())
    again = new_table(parallel, rollout={"group_size": 1}, journal=Journal(tmp_path))
    again.pool.load_state_dict({"next_group": 0, "counts": {}, "journal": 1})
    again.pool.recover()
    assert again.pool.is_replaying
    (restored,) = asyncio.run(again.episodes())
    assert restored == trajectory
    assert not again.engine.asked


def test_an_interrupted_episode_continues_from_its_record(new_table: Callable[..., Table]) -> None:
    table = new_table(three_turns, rollout={"group_size": 1, "mode": "partial", "max_live_episodes": 1})

    async def interrupted() -> LiveEpisode:
        await table.pool.resume()
        table.pool._fill_slots()
        while len(table.engine.asked) < 2:
            await asyncio.sleep(0)
        await table.pool.pause()
        live = next(iter(table.pool._live.values())).live()
        await table.pool.stop()
        return live

    live = asyncio.run(interrupted())
    assert len(live.turns) == 1
    (partial,) = live.partials
    assert 0 < len(partial.completion.token_ids) < 6

    async def resumed() -> Trajectory:
        await table.engine.resume()
        return await table.player.new(live, context=table.pool.context, listeners=Listeners()).play()

    trajectory = asyncio.run(resumed())
    assert trajectory.reward == 2.0
    assert trajectory.turns[0] == live.turns[0]
    assert trajectory.turns[1].action_ids[: len(partial.completion.token_ids)] == partial.completion.token_ids
