import io

from rich.console import Console, RenderableType
from rich.style import Style

from agentrl.report.records import TrajectoryRecord
from agentrl.report.terminal import advantage_style, legend, render
from tests.support.each import each
from tests.support.records import record, turn


def printed(shown: RenderableType, *, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def background(shown: RenderableType, text: str) -> tuple[int, int, int] | None:
    """Return the background in which a piece of text is drawn."""
    console = Console(width=100, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    found = [segment.style for segment in console.render(shown) if segment.text == text]
    assert len(found) == 1, f"{text!r} is drawn {len(found)} times"
    color = found[0].bgcolor if found[0] else None
    return tuple(color.triplet) if color and color.triplet else None  # type: ignore[return-value]


def dialogue() -> TrajectoryRecord:
    return record(
        turn([{"role": "user", "content": "2+3=?"}], ["Let", " me", " think"], [1.0, -0.5, 0.0]),
        turn([{"role": "tool", "content": "5"}], ["five"], [0.25]),
        metrics={"success": 1.0, "env_s": 0.5},
    )


def test_a_rollout_is_told_in_its_messages_rewards_and_advantages() -> None:
    lines = [line.strip("│ ").rstrip() for line in printed(render(dialogue())).splitlines()]
    assert "train/000001/2  reward 0.5  terminated" in lines[0]
    assert lines[1:5] == [
        "user: 2+3=?",
        "assistant: Let me think   [turn 1: reward 0.25, advantage +0.167]",
        "tool: 5",
        "assistant: five   [turn 2: reward 0.25, advantage +0.250]",
    ]
    assert "success 1" in lines[5]
    assert "env_s" not in lines[5]


def test_all_metrics_are_shown_however_narrow_the_terminal_is() -> None:
    metrics = {f"metric_{number}": float(number) for number in range(12)}
    shown = printed(render(dialogue().model_copy(update={"metrics": metrics})), width=60)
    words = " ".join(line.strip("│ ") for line in shown.splitlines())
    assert [name for name, value in metrics.items() if f"{name} {value:g}" not in words] == []


def test_an_action_that_calls_is_shown_as_a_call_below_its_tokens() -> None:
    call = {"function": {"name": "calc", "arguments": {"a": 3, "op": "*", "b": 8}}}
    acts = turn([], ["<call>", "3*8"], [1.0, 1.0]).model_copy(update={"message": {"role": "a", "tool_calls": [call]}})
    lines = [line.strip("│ ").rstrip() for line in printed(render(record(acts))).splitlines()]
    assert lines[1] == "assistant: <call>3*8"
    assert lines[2].startswith('called calc(a=3, op="*", b=8)   [turn 1: reward 0.25')


def test_tokens_are_green_where_the_advantage_is_positive_and_red_where_it_is_negative() -> None:
    shown = render(dialogue())
    assert background(shown, "Let") == (0, 190, 0)  # 40 + 150 of the largest advantage
    assert background(shown, " me") == (115, 0, 0)  # 40 + 150 * 0.5
    assert background(shown, " think") is None
    assert background(shown, "five") == (0, 77, 0)  # one scale for the whole trajectory: 40 + 150 * 0.25
    assert background(legend(), " negative ") == (190, 0, 0)
    assert background(legend(), " positive ") == (0, 190, 0)


@each(("advantage", "scale"), [(0.0, 1.0), (0.0, 0.0), (5.0, 0.0)])
def test_without_a_spread_nothing_is_coloured(advantage: float, scale: float) -> None:
    assert advantage_style(advantage, scale) == Style()


def test_tokens_that_left_the_loss_are_struck_out_and_not_coloured() -> None:
    shown = render(record(turn([], ["in", "out"], [1.0, 1.0], keep=[True, False])))
    assert background(shown, "in") == (0, 190, 0)
    assert background(shown, "out") is None
    console = Console(width=100, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    (style,) = [segment.style for segment in console.render(shown) if segment.text == "out"]
    assert style is not None
    assert style.strike


def test_brackets_are_text_and_no_markup() -> None:
    shown = printed(
        render(record(turn([{"role": "user", "content": "[b]?"}], ["[red]"], [1.0]), metrics={"a[0]": 2.0}))
    )
    for text in ("user: [b]?", "assistant: [red]", "a[0] 2"):
        assert text in shown


def test_an_error_stands_below_the_turns_and_empty_messages_do_no_harm() -> None:
    empty = turn([{"role": "assistant", "content": None, "tool_calls": []}], [], [])
    lines = [line.strip("│ ") for line in printed(render(record(empty, error="step() raised")), width=60).splitlines()]
    assert "env_error" in lines[0]
    assert lines[2] == "assistant:    [turn 1: reward 0.25, advantage +0.000]"
    assert lines[3] == "step() raised"


def test_calls_that_are_no_list_are_told_as_they_stand() -> None:
    assert "user: hm 1" in printed(
        render(record(turn([{"role": "user", "content": "hm", "tool_calls": 1}], ["a"], [0.0])))
    )


def test_tokens_are_decoded_where_there_is_a_tokenizer() -> None:
    read = turn([{"role": "user", "content": "as a message"}], ["a"], [1.0])
    again = read.model_copy(update={"observation_ids": [7, 8], "extends": False})
    shown = printed(
        render(record(read.model_copy(update={"observation_ids": [5]}), again), lambda ids: f"<read {ids}>")
    )
    assert "as a message" not in shown
    assert shown.index("<read [5]>") < shown.index("the history was rewritten") < shown.index("<read [7, 8]>")
