"""Where a thought is dropped, a new segment begins: trained once, behind the prefix that stays."""

from agentrl.chat import AutoConfig, Dialogue
from agentrl.learn.tokens import rows_of
from agentrl.policy.layout.tree import plan_tree
from tests.support.templates import THINKS, THOUGHT, changed, tokenizer


def test_each_sampled_token_is_trained_once_and_the_prefix_that_stays_is_computed_once() -> None:
    made = tokenizer(changed(THINKS, THOUGHT))
    renderer = AutoConfig().build(made)
    assert renderer.thinking == "drop_at_user"
    dialogue = Dialogue.begin([{"role": "user", "content": "A question. " * 20}], [], renderer)
    turns, prompts = [], []
    for number in range(3):
        message = {"role": "assistant", "reasoning_content": f"Thought {number}.", "content": f"Answer {number}."}
        action = renderer.encode(message)
        turns.append(dialogue.turn(action))
        prompts.append(dialogue.context_ids)
        dialogue = dialogue.after(action, message, [{"role": "user", "content": f"Question {number}."}], renderer)
    rows = rows_of(turns)
    assert [turn.extends for turn in turns] == [True, False, False]
    # Every sampled token once, in the context in which it was sampled.
    assert [tuple(row.ids_L) for row in rows] == [(*p, *t.action_ids) for p, t in zip(prompts, turns, strict=True)]
    assert [tuple(row.ids_L[row.positions_T]) for row in rows] == [turn.action_ids for turn in turns]
    ids = [tuple(row.ids_L) for row in rows]
    assert all(one[: len(prompts[0])] == prompts[0] for one in ids)
    prefixes = {one[:length] for one in ids for length in range(1, len(one) + 1)}
    assert plan_tree([row.ids_L for row in rows]).num_tokens == len(prefixes) < sum(map(len, ids))
