"""Scores of tokens are those of a plain pass over each token's own context; hints and answers change nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.chat import AutoConfig, ChatMLRenderer, HistoryConfig, Renderer, train_tokenizer
from agentrl.env import base_env, make_env
from agentrl.learn.plan import MicroBatch, Planner
from agentrl.learn.signals.answer_logprobs import answers_at_each_turn
from agentrl.learn.signals.hindsight_logprobs import rows_in_hindsight
from agentrl.learn.signals.scoring import score_tokens, with_tokens
from agentrl.learn.tokens import TokenBatch
from agentrl.policy.config import Layout
from agentrl.policy.model import Policy
from agentrl.types import Trajectory
from tests.support.each import each
from tests.support.hugging_face import TEMPLATE
from tests.support.played import TOKENIZER, asked, contexts, new_policy, plain_passes, plain_scores, play
from tests.support.renderers import OftenStops, StartsAgain
from tests.support.signals import without_signals


def logprobs_of(policy: Policy, micro: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    found: Tensor = policy(micro.inputs, micro.slot_T, micro.target_T, temperature)[0]
    return found


def entropies_of(policy: Policy, micro: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    found: Tensor = policy(micro.inputs, micro.slot_T, micro.target_T, temperature)[1]
    return found


POLICY = new_policy().double()
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
on_a_tree = partial(Planner, layout="tree")


@pytest.fixture(scope="module")
def played() -> list[Trajectory]:
    return play(POLICY)


def test_the_trajectories_at_hand_are_ragged_and_some_rewrite_history(played: list[Trajectory]) -> None:
    lengths = [sum(len(turn.observation_ids) + len(turn.action_ids) for turn in t.turns) for t in played]
    assert len(set(lengths)) > 3
    assert lengths != sorted(lengths)  # micro-batches go by length, so order can be lost
    assert [turn.extends for turn in played[0].turns] == [True, True, True, False, True, True]
    assert len({len(turn.action_ids) for t in played for turn in t.turns}) > 4


@pytest.mark.slow
@each("layout", LAYOUTS)
@each("temperature", [0.6, 1.0, 1.5])
def test_each_token_is_scored_as_in_a_plain_pass_over_its_own_context(
    temperature: float, layout: Layout, played: list[Trajectory]
) -> None:
    expected = [plain_scores(POLICY, t, temperature=temperature) for t in played]
    for index, score in enumerate((logprobs_of, entropies_of)):
        columns = score_tokens(
            partial(score, POLICY, temperature=temperature),
            TokenBatch.from_trajectories(played),
            planner=Planner(layout=layout, max_tokens=400),
        )
        assert len(columns) == len(played)
        for column_T, scores in zip(columns, expected, strict=True):
            np.testing.assert_allclose(column_T, scores[index], rtol=1e-9)


def test_scores_under_the_weights_that_sampled_are_the_behaviors(played: list[Trajectory]) -> None:
    columns = score_tokens(
        partial(logprobs_of, POLICY), TokenBatch.from_trajectories(played), planner=on_a_tree(max_tokens=400)
    )
    for column_T, trajectory in zip(columns, played, strict=True):
        behavior = [logprob for turn in trajectory.turns for logprob in turn.behavior_logprobs]
        np.testing.assert_allclose(column_T, behavior, rtol=1e-5, atol=1e-5)  # the engine ran in float32


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(6)),
    max_tokens=st.integers(min_value=1, max_value=2000),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_order_budget_and_layout_give_the_same_scores(
    order: list[int], max_tokens: int, layout: Layout, played: list[Trajectory]
) -> None:
    score = partial(logprobs_of, POLICY)
    whole = score_tokens(score, TokenBatch.from_trajectories(played), planner=on_a_tree(max_tokens=10**9))
    shuffled = score_tokens(
        score,
        TokenBatch.from_trajectories([played[i] for i in order]),
        planner=Planner(layout=layout, max_tokens=max_tokens),
    )
    for i, column_T in zip(order, shuffled, strict=True):
        np.testing.assert_allclose(column_T, whole[i], rtol=1e-9)


def test_scoring_keeps_no_graph_and_stays_within_its_budget(played: list[Trajectory]) -> None:
    seen: list[tuple[bool, int]] = []

    def score(micro: MicroBatch) -> Tensor:
        found = logprobs_of(POLICY, micro)
        seen.append((found.requires_grad, micro.inputs.ids_BL.numel()))
        return found

    score_tokens(score, TokenBatch.from_trajectories(played), planner=on_a_tree(max_tokens=1000))
    assert len(seen) > 1
    assert all(not requires_grad and num_tokens <= 1000 for requires_grad, num_tokens in seen)
    assert {parameter.grad for parameter in POLICY.parameters()} == {None}


def test_a_column_is_cut_where_the_turns_end(played: list[Trajectory]) -> None:
    trajectory = played[0]
    column_T = np.arange(trajectory.num_action_tokens, dtype=np.float64)
    [found] = with_tokens([trajectory], "values", [column_T])
    assert [token for turn in found.turns for token in turn.signals["values"]] == column_T.tolist()
    assert found.turns[1].signals["values"] == tuple(
        range(len(trajectory.turns[0].action_ids), sum(len(turn.action_ids) for turn in trajectory.turns[:2]))
    )
    assert without_signals(found) == trajectory


def tools(env: str) -> list[dict[str, Any]]:
    return base_env(make_env(env)).tools


def written(ids: Sequence[int]) -> str:
    """Return tokens as text of one character a byte: random bytes are not always valid UTF-8."""
    return "".join(TOKENIZER.convert_ids_to_tokens(list(ids)))


def as_written(text: str) -> str:
    return written(TOKENIZER.encode(text, add_special_tokens=False))


@each(("rewards", "total"), [((0.25, 0.0, 1.0), "1.25"), ((1 / 3,), "0.333"), ((-2.0,), "-2")])
def test_the_hint_stands_in_the_first_message_and_wherever_the_history_is_rendered_again(
    rewards: tuple[float, ...], total: str, played: list[Trajectory]
) -> None:
    trajectory = played[0]
    paid = [*rewards, *[0.0] * (len(trajectory.turns) - len(rewards))]
    turns = [replace(turn, reward=reward) for turn, reward in zip(trajectory.turns, paid, strict=True)]
    changed = replace(trajectory, turns=tuple(turns))
    told = rows_in_hindsight(changed, StartsAgain(TOKENIZER), tools("key_door"), view=HistoryConfig())
    asking = trajectory.turns[0].observation[-1]["content"]
    hinted = f"{asking}\n(In hindsight: the total reward was {total}.)"
    assert [np.unique(row.turn_T).tolist() for row in told] == [[0, 1, 2], [3, 4, 5]]
    for context_ids, (told_ids, _) in zip(contexts(trajectory), asked(told), strict=True):
        assert written(context_ids).count(as_written(asking)) == 1
        assert written(told_ids) == written(context_ids).replace(as_written(asking), as_written(hinted))


def test_being_told_changes_no_action_and_nothing_that_was_added_after_one(played: list[Trajectory]) -> None:
    for trajectory in played:
        told = list(
            asked(rows_in_hindsight(trajectory, StartsAgain(TOKENIZER), tools("key_door"), view=HistoryConfig()))
        )
        assert [action_ids for _, action_ids in told] == [turn.action_ids for turn in trajectory.turns]
        for (before, action_ids), (context_ids, _), turn in zip(told, told[1:], trajectory.turns[1:], strict=False):
            if turn.extends:
                assert context_ids == (*before, *action_ids, *turn.observation_ids)


def test_the_hint_tells_the_known_answer() -> None:
    renderer = OftenStops(TOKENIZER)
    trajectories = play(POLICY, env="calculator", renderer=renderer, num=4)
    assert len({t.gold_answer for t in trajectories}) > 1
    for trajectory in trajectories:
        (first_ids, _), *_ = asked(rows_in_hindsight(trajectory, renderer, tools("calculator"), view=HistoryConfig()))
        text = TOKENIZER.decode(list(first_ids))
        assert f"=?\n(In hindsight: the total reward was 0. The right answer is: {trajectory.gold_answer})" in text
        assert "calc(a: integer" in text  # the tools are still there


def test_a_template_that_renders_every_turn_again_tells_the_hint_once_in_each() -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    tokenizer.chat_template = TEMPLATE.replace("REWRITTEN", "loop.index < messages | length - 2")
    renderer = AutoConfig().build(tokenizer)
    env = base_env(make_env("key_door"))
    (trajectory,) = play(POLICY, renderer=Impatient(renderer), num=1)
    assert [turn.extends for turn in trajectory.turns] == [True] + [False] * 5
    told = rows_in_hindsight(trajectory, renderer, env.tools, view=HistoryConfig())
    for (told_ids, _), original in zip(asked(told), trajectory.turns, strict=True):
        text = TOKENIZER.decode(list(told_ids))
        hint = "\n(In hindsight: the total reward was 0.)"
        assert text.count(hint) == 1
        assert text.replace(hint, "") == TOKENIZER.decode(list(original.observation_ids))
    tokens = TokenBatch.from_rows([told], group_ids=["g"])
    scored = score_tokens(partial(logprobs_of, POLICY), tokens, planner=on_a_tree(max_tokens=10**9))
    np.testing.assert_allclose(scored[0], plain_passes(POLICY, asked(told))[0], rtol=1e-9)
    assert np.abs(scored[0] - plain_scores(POLICY, trajectory)[0]).max() > 1e-3  # the hint is read


class Impatient:
    """A renderer under which every fourth token ends a turn."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.start, self.extend, self.encode = renderer.start, renderer.extend, renderer.encode
        self.parse, self.max_token_chars = renderer.parse, renderer.max_token_chars
        self.thinking = renderer.thinking

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted({*self._renderer.stop_token_ids, *range(5, 261, 4)}))


def test_the_answer_follows_the_very_context_of_each_turn(played: list[Trajectory]) -> None:
    renderer = ChatMLRenderer(TOKENIZER)
    answer_ids = TOKENIZER.encode("-17", add_special_tokens=False)
    for trajectory in played:
        answers = answers_at_each_turn(replace(trajectory, gold_answer="-17"), renderer)
        assert [row.ids_L.tolist() for row in answers] == [[*ids, *answer_ids] for ids in contexts(trajectory)]
        assert [row.ids_L[row.positions_T].tolist() for row in answers] == [answer_ids] * len(trajectory.turns)
        assert [set(row.turn_T.tolist()) for row in answers] == [{k} for k in range(len(trajectory.turns))]


def test_the_stop_token_of_a_template_is_left_out_of_the_answer_too(played: list[Trajectory]) -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    tokenizer.chat_template = TEMPLATE.replace("REWRITTEN", "false")
    renderer = AutoConfig().build(tokenizer)
    assert renderer.encode({"role": "assistant", "content": "42"})[-1] in renderer.stop_token_ids
    (row, *_) = answers_at_each_turn(replace(played[0], gold_answer="42"), renderer)
    assert TOKENIZER.decode(row.ids_L[row.positions_T].tolist()) == "42"


def test_the_score_of_an_answer_is_that_of_a_plain_pass(played: list[Trajectory]) -> None:
    trajectory = replace(played[0], gold_answer="1234")
    answers = answers_at_each_turn(trajectory, ChatMLRenderer(TOKENIZER))
    tokens = TokenBatch.from_rows([[row] for row in answers], group_ids=["g"] * len(answers))
    columns = score_tokens(partial(logprobs_of, POLICY), tokens, planner=on_a_tree(max_tokens=500))
    answer_ids = TOKENIZER.encode("1234", add_special_tokens=False)
    assert len(answer_ids) == 4
    means = []
    for context_ids in contexts(trajectory):
        with torch.no_grad():
            table = POLICY.model(torch.tensor([[*context_ids, *answer_ids]])).logits[0].log_softmax(-1)
        means.append(np.mean([float(table[len(context_ids) - 1 + j, token]) for j, token in enumerate(answer_ids)]))
    np.testing.assert_allclose([column_T.mean() for column_T in columns], means, rtol=1e-9)
    assert np.ptp(means) > 1e-3
