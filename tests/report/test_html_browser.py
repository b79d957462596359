"""The report as a browser shows it: one browser for all of these."""

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.report.html import write_report
from agentrl.report.html.page import write_page
from agentrl.types import StopReason
from tests.support.browser import Watched, browser, until
from tests.support.records import record, turn
from tests.support.report_runs import make_run, member
from tests.support.view_server import Server

pytestmark = pytest.mark.process
Open = Callable[..., Watched]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    contexts = []

    def open_one(path: Path | str, *, width: int = 1300, **options: Any) -> Watched:
        context = chromium.new_context(viewport={"width": width, "height": 850}, **options)
        contexts.append(context)
        watched = Watched(context.new_page())
        watched.page.goto(path if isinstance(path, str) else path.as_uri())
        watched.page.wait_for_selector("[role=tab][aria-selected=true]")
        return watched

    yield open_one
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds with rollouts of each kind."""
    top = tmp_path_factory.mktemp("report")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "to": "b"}}}
    asks = turn([{"role": "user", "content": "1 + 1?"}], ["let me", " see"], [1.0, -1.0], keep=[True, False])
    asks = asks.model_copy(update={"message": {"role": "assistant", "content": "", "tool_calls": [call]}})
    ends = turn([{"role": "tool", "name": "add", "content": "Error: no needle"}], ["two"], [0.5])
    longer = record(asks, ends).model_copy(update={"trajectory_id": "train/000001/2", "reward": 0.5, "step": 3})
    other = record(asks, turn([{"role": "tool", "name": "add", "content": "2"}], ["2"], [0.0]))
    other = other.model_copy(update={"trajectory_id": "train/000001/3", "reward": 0.25, "step": 3})
    broken = member(4, reward=0.0, stop_reason=StopReason.ENV_ERROR, error="the desk burnt")
    first = make_run(top / "a", seed=0, rollouts=[member(0, reward=1.0), member(1, reward=0.0), longer, other, broken])
    second = make_run(top / "b", seed=1, rewards=(0.2, 0.4, 0.9), rollouts=[member(0, reward=1.0, task="3 times 3?")])
    return write_report([first.path, second.path], top / "report.html")


PAYLOADS = (
    "<script>HIT({n})</script>",
    "</script><script>HIT({n})</script>",
    "<!--<script>HIT({n})//-->",
    "<img src=x onerror=HIT({n})>",
    "<svg/onload=HIT({n})>",
    "<iframe srcdoc='<script>parent.HIT({n})</script>'></iframe>",
    "javascript:HIT({n})",
    '"onmouseover="HIT({n})" autofocus onfocus="HIT({n})',
    "'-HIT({n})-'",
    "`${{HIT({n})}}`",
    "{{{{constructor.constructor('HIT({n})')()}}}}",
    "]]><script>HIT({n})</script>",
    "</style><style>@import 'http://evil.test/{n}'</style>",
    "<link rel=stylesheet href=http://evil.test/{n}>",
    "<meta http-equiv=refresh content='0;url=http://evil.test/{n}'>",
    "<base href=http://evil.test/{n}>",
    "<a href='javascript:HIT({n})' ping='http://evil.test/{n}'>a</a>",
    "<math><mtext></table></math><img src=http://evil.test/{n} onerror=HIT({n})>",
    "\u2028HIT({n})\u2029",
    "\u202e)n(TIH\u202c<\u017fcript>HIT({n})</\u017fcript>",
    "\ud800<script>HIT({n})</script>\udfff",
    "\x00\x1b[2J<script\x00>HIT({n})</script>",
    "+ADw-script+AD4-HIT({n})+ADw-/script+AD4-",
    "__proto__",
    "constructor",
    "\\u003cscript\\u003eHIT({n})\\u003c/script\\u003e",
    "&lt;script&gt;HIT({n})&lt;/script&gt;",
    "<template><script>HIT({n})</script></template>",
    "<form action=http://evil.test/{n}><button autofocus>",
    "<object data='data:text/html,<script>HIT({n})</script>'>",
)


def hostile_strings(number: int) -> Iterator[str]:
    rng = random.Random(0)
    alphabet = "<>/\"'`=&;{}()[]!-\\ \n\t\x00\x7f\u2028\u202e\ud800\ufeffscriptimgonload"
    for n, payload in zip(range(number), itertools.cycle(PAYLOADS), strict=False):
        noise = "".join(rng.choices(alphabet, k=rng.randrange(8)))
        yield noise + payload.format(n=n) + noise


@pytest.mark.slow
def test_ten_thousand_hostile_strings_run_nothing_and_ask_for_nothing(tmp_path: Path, open_page: Open) -> None:
    given = hostile_strings(10_000)

    def take(num: int) -> list[str]:
        return list(itertools.islice(given, num))

    run_name = "<img src=x onerror=HIT(0)>"
    folder = make_run(tmp_path / run_name, rewards=(), env={"id": next(given)}, chat={"system": next(given)})
    folder.add_metrics({"step": 1.0} | dict.fromkeys(take(300), 0.5))
    roles = itertools.cycle(["user", "tool", "system", "assistant"])
    rollouts = []
    for number in range(150):
        turns = []
        for _ in range(3):
            read: list[dict[str, Any]] = [
                {"role": next(roles), "name": next(given), "content": next(given), "reasoning_content": next(given)}
                for _ in range(2)
            ]
            read[0]["tool_calls"] = [{"function": {"name": next(given), "arguments": next(given)}}]
            made = turn(read, take(5), [float(number)] * 5)
            update = {
                "message": {
                    "role": next(given),
                    "content": next(given),
                    "tool_calls": [{"function": {"name": next(given)}}],
                },
                "state_key": next(given),
                "action_key": next(given),
                "extras": {"reward_components": {next(given): 1.0}},
            }
            turns.append(made.model_copy(update=update))
        fields = {
            "group_id": next(given),
            "trajectory_id": next(given),
            "gold_answer": next(given),
            "env_id": next(given),
        }
        rollouts.append(record(*turns, error=next(given)).model_copy(update=fields))
    rollouts += [member(number, reward=0.0, text=text) for number, text in enumerate(given)]  # what is left of them
    assert next(given, None) is None
    folder.add_rollouts(1, [])
    lines = (json.dumps(each.model_dump(mode="python")) for each in rollouts)  # in ASCII: some are no UTF-8
    folder.rollouts()[0].write_text("\n".join(lines), encoding="ascii")
    path = write_report([folder.path], tmp_path / "hostile.html")
    watched = open_page(path)
    page = watched.page
    for tab in ("metrics", "warnings", "recipe", "rollouts", "overview"):
        page.click(f"#tab-{tab}")
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    # Everything through what draws it: each rollout as a dialogue, its group and its tree, in every colour.
    num = page.evaluate(
        """async () => {
          let drawn = 0;
          const box = document.body.appendChild(el("div"));
          for (const number of new Set(pageData().rollouts.map((entry) => entry.block))) {
            const rollouts = JSON.parse(await blockText(number));
            const entries = pageData().rollouts.filter((entry) => entry.block === number);
            const scale = scaleOf(rollouts, "advantage");
            const dialogues = rollouts.map((rollout, at) => dialogueOf(rollout, at, "advantage", scale));
            const group = groupOf(rollouts, entries, "advantage", scale, 0, () => 0);
            box.replaceChildren(...dialogues, treeOf(rollouts, entries, () => 0), group);
            drawn += box.querySelectorAll(".dialogue").length;
          }
          return drawn;
        }"""
    )
    assert num == 2 * len(rollouts)
    page.click("#tab-rollouts")
    page.wait_for_selector(".row")
    page.fill(".rollouts .search", "HIT(77")
    page.press(".rollouts .search", "Enter")
    page.wait_for_timeout(300)
    assert watched.requests == [path.as_uri()]
    assert watched.errors == [], "a script was refused by the policy alone, or failed"
    assert watched.dialogs == []
    assert page.evaluate("typeof HIT") == "undefined"
    elements = (
        "document.querySelectorAll('main :is(script, img, iframe, style, link, object, form, base, meta, svg)').length"
    )
    assert page.evaluate(elements) == 0
    listening = (
        "[...document.querySelectorAll('*')].some((each) => each.getAttributeNames().some((name) => /^on/.test(name)))"
    )
    assert page.evaluate(listening) is False


def test_markup_that_slips_into_a_page_runs_nothing_all_the_same(tmp_path: Path, open_page: Open) -> None:
    """The policy holds by itself: here a script of the page does what none does."""
    careless = """
      document.getElementById("page").append(el("b", {role: "tab", "aria-selected": "true"}, "here"));
      window.refused = [];
      for (const act of [
        () => document.body.insertAdjacentHTML("beforeend", "<img src=http://evil.test onerror=HIT()>"),
        () => eval("1"),
        () => document.body.append(Object.assign(document.createElement("script"), {text: "HIT()"})),
      ]) try { act(); refused.push(false); } catch (error) { refused.push(error.name); }
      document.body.append(Object.assign(document.createElement("img"), {src: "http://evil.test/a.png"}));
      fetch("http://evil.test/b").catch(() => refused.push("fetch"));
    """
    path = write_page(tmp_path / "page.html", title="careless", data={}, scripts=[careless])
    watched = open_page(path)
    until(watched.page, "refused.length === 4")
    assert watched.page.evaluate("refused") == ["TypeError", "EvalError", "TypeError", "fetch"]
    assert watched.requests == [path.as_uri(), "http://evil.test/a.png"]
    assert watched.refused == ["http://evil.test/a.png"]  # before it left
    assert watched.page.evaluate("typeof HIT") == "undefined"


def test_curves_and_rollouts_are_seen(report: Path, open_page: Open) -> None:
    watched = open_page(report)
    page = watched.page
    chart = page.locator("figure[aria-label^='Training: reward']").first
    assert (
        chart.get_attribute("aria-label") == "Training: reward, from 0.1 to 0.95"
    )  # of seeds that went 0 to 1 and .2 to .9
    chart.locator("canvas").wait_for()
    assert page.inner_text("h1") == "desk: 2 runs"
    page.click("#tab-metrics")
    page.fill("#panel-metrics .search", "time")
    assert page.locator("#panel-metrics figure:visible .name").all_inner_texts() == ["Time of a step"]
    page.click("#tab-rollouts")
    page.wait_for_selector(".tokens")
    assert page.inner_text(".pane h2") == "train/000001/4"  # it failed
    assert "the desk burnt" in page.inner_text(".pane")
    assert page.locator(".row").count() == 6
    assert watched.errors == []
    assert watched.requests == [report.as_uri()]


def test_tokens_are_coloured_by_sign_and_size_and_told_when_pointed_at(report: Path, open_page: Open) -> None:
    page = open_page(report).page
    page.click("#tab-rollouts")
    page.fill("[aria-label='Reward from']", "0.5")
    page.fill("[aria-label='Reward to']", "0.5")
    page.wait_for_selector(".pane h2:text('train/000001/2')")
    assert page.locator(".calls li").all_inner_texts() == ['add(a=1, to="b")']
    assert not page.locator(".token").first.is_visible()
    page.click(".raw summary")  # the tokens, one click away
    tokens = page.locator(".token")
    assert tokens.all_inner_texts() == ["let me", " see", "two"]
    shares = page.evaluate(
        "[...document.querySelectorAll('.token')].map((each) => each.style.getPropertyValue('--share'))"
    )
    assert shares == ["1", "1", "0.5"]
    assert [tokens.nth(index).get_attribute("class") for index in range(3)] == [
        "token positive",
        "token negative left-out",
        "token positive",
    ]
    tokens.nth(1).hover()
    told = page.inner_text(".inspector")
    assert "advantage \u22121" in told
    assert "in the loss no" in told
    page.select_option(".pane select", "probability")
    assert page.locator(".token.positive, .token.negative, .token.amount").count() == 0  # all were certain
    page.select_option(".pane select", "other:uniform")
    assert "uniform" in page.locator(".notes").first.inner_text()


def test_groups_stand_side_by_side_and_forks_as_a_tree(report: Path, open_page: Open) -> None:
    page = open_page(report).page
    page.click("#tab-rollouts")
    page.click("button:text-is('Group of 5')")
    assert page.locator(".column").count() == 5
    page.click(".column .head:has-text('…/2')")
    page.wait_for_selector(".pane h2:text('train/000001/2')")
    page.click("button:text-is('Tree')")
    tree = page.locator(".tree > ul > li")
    shared = tree.filter(has_text="2 rollouts, mean reward 0.375")  # those of reward .5 and .25 began alike
    assert shared.locator("ul > li > .node").count() == 2
    assert tree.count() == 2  # the three short members said the same, too


def test_the_calls_of_an_agent_are_drawn_as_lines(tmp_path: Path, open_page: Open) -> None:
    first = turn([{"role": "user", "content": "1 + 1?"}], ["two"], [1.0])
    asks = {
        "continues": {"ignored": {"temperature": "0.3"}, "dialect": "chat, streamed"},
        "forks": {"call": "forks"},
        "rewrites": {"call": "rewrites", "difference": "message 1: two became <b>three</b>"},
        "root": {"call": "root"},
    }
    turns = [first.model_copy(update={"extras": extras}) for extras in asks.values()]
    turns[1] = turns[1].model_copy(update={"parent": 0})
    turns[2] = turns[2].model_copy(update={"parent": 0, "extends": False})
    turns[3] = turns[3].model_copy(update={"agent": "writer", "extends": False})
    shown = record(first, *turns)
    run = make_run(tmp_path / "run", seed=0, rollouts=[shown.model_copy(update={"step": 3})])
    page = open_page(write_report([run.path], tmp_path / "page.html")).page
    page.get_by_role("tab", name="Rollouts").click()
    rows = page.get_by_role("table", name="Calls of the agent").get_by_role("row")
    told = [row.inner_text() for row in rows.all()]
    assert [line in row for line, row in zip(_RELATIONS, told, strict=True)] == [True] * 5, told
    assert "not taken over: temperature: 0.3" in told[1]
    assert "dialect chat, streamed" in page.locator("main").inner_text()
    assert "message 1: two became <b>three</b>" in told[3]
    lanes = [[cell.inner_text() for cell in row.locator("td.lane").all()] for row in rows.all()]
    assert lanes == [["1", ""], ["2", ""], ["3", ""], ["4", ""], ["", "5"]]


_RELATIONS = ("begins a line", "continues turn 1", "forks from turn 1", "rewrites turn 1", "writer · begins a line")


def test_a_group_that_never_began_is_seen(tmp_path: Path, open_page: Open) -> None:
    failed = [
        member(number, reward=0.0, turns=[], stop_reason=StopReason.ENV_ERROR, error="burnt") for number in (0, 1)
    ]
    run = make_run(tmp_path / "run", rollouts=failed)
    watched = open_page(write_report([run.path], tmp_path / "page.html"))
    page = watched.page
    page.click("#tab-rollouts")
    page.click("button:text-is('Group of 2')")
    assert page.locator(".column").count() == 2
    assert page.locator(".column").first.inner_text().count("burnt") == 1
    assert watched.errors == []


def test_search_and_filters_choose_rollouts(report: Path, open_page: Open) -> None:
    page = open_page(report).page
    page.click("#tab-rollouts")
    ids = "[...document.querySelectorAll('.row .task')].map((each) => each.textContent)"
    page.fill(".rollouts .search", "times 3")
    assert page.evaluate(ids) == ["3 times 3?"]
    page.fill(".rollouts .search", "needle")
    assert page.locator(".row").count() == 0  # a tool said it, which the list does not show
    page.press(".rollouts .search", "Enter")
    page.wait_for_selector(".pane h2:text('train/000001/2')")
    assert page.locator(".row").count() == 1
    page.fill(".rollouts .search", "")
    for label, value, number in (
        ("Stop reason", "env_error", 1),
        ("Tool", "add", 2),
        ("Error", "tool", 1),
        ("Run", "1", 1),
    ):
        page.select_option(f"[aria-label='{label}']", value)
        assert page.locator(".row").count() == number, label
        page.select_option(f"[aria-label='{label}']", "")
    assert page.locator(".row").count() == 6


def test_the_keyboard_is_enough(report: Path, open_page: Open) -> None:
    page = open_page(report).page
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.getAttribute('type')") == "search"
    page.keyboard.press("Escape")
    selected = "[...document.querySelectorAll('.row')].findIndex((each) => each.ariaSelected === 'true')"
    until(page, f"{selected} === 0")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate(selected) == 2
    page.keyboard.press("k")
    assert page.evaluate(selected) == 1
    page.focus("[role=listbox]")
    page.keyboard.press("ArrowDown")
    active = page.get_attribute("[role=listbox]", "aria-activedescendant")
    assert page.get_attribute(f"#{active}", "aria-selected") == "true"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.focus("#tab-rollouts")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-warnings"
    assert page.locator("#panel-warnings").is_visible()


NAMELESS = """
[...document.querySelectorAll("button, select, input, [role=listbox], figure[role=img], [role=region]")]
  .filter((each) => !(each.ariaLabel || each.labels?.length || each.textContent.trim()))
  .map((each) => each.outerHTML)
"""
CONTRASTS = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = (name) => {
    canvas.fillStyle = color(name);
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (one, other) => {
    const [more, less] = [light(one), light(other)].sort((a, b) => b - a);
    return (more + 0.05) / (less + 0.05);
  };
  const names = ["ink", "muted", "accent", "bad", "good", "curve-0", "curve-1", "curve-2", "curve-3"];
  return Object.fromEntries(names.map((name) => [name, Math.min(contrast(name, "surface"), contrast(name, "ground"))]));
}
"""
"""Of what is written, and drawn, with its ground (WCAG 2)."""


def test_every_control_has_a_name_and_text_has_contrast(report: Path, open_page: Open) -> None:
    for scheme in ("light", "dark"):
        page = open_page(report, color_scheme=scheme).page
        page.click("#tab-rollouts")
        page.wait_for_selector(".tokens")
        assert page.evaluate(NAMELESS) == []
        contrasts = page.evaluate(CONTRASTS)
        assert all(ratio >= (3.0 if name.startswith("curve") else 4.5) for name, ratio in contrasts.items()), (
            scheme,
            contrasts,
        )


def test_a_narrow_window_scrolls_in_one_direction(report: Path, open_page: Open) -> None:
    page = open_page(report, width=390).page
    for tab in ("overview", "metrics", "rollouts", "warnings", "recipe"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab


def test_labels_of_filters_are_whole(report: Path, open_page: Open) -> None:
    page = open_page(report).page
    page.click("#tab-rollouts")
    cut = """[...document.querySelectorAll(".fields select:not([hidden])")].flatMap((select) => {
      const canvas = document.createElement("canvas").getContext("2d");
      const { font, fontSize, fontFamily } = getComputedStyle(select);
      canvas.font = font || `${fontSize} ${fontFamily}`;
      const room = select.clientWidth - 12 - 20; // but for padding and the arrow
      return [...select.options].map((each) => each.text).filter((text) => canvas.measureText(text).width > room);
    })"""
    assert page.evaluate(cut) == []


def test_constants_are_listed_and_not_drawn_and_long_curves_are_smoothed(tmp_path: Path, open_page: Open) -> None:
    run = make_run(tmp_path / "run", rewards=[0.0, 1.0] * 20, credit={"scheme": "uniform", "gamma": 0.5})
    for step in range(41, 44):
        run.add_metrics({"step": float(step), "staleness/mean": 0.0, "clip/tokens": step / 1000})
    defaults = {"credit": {"scheme": "uniform"}, "seed": 0, "train": {"steps": 3}}
    page = open_page(write_report([run.path], tmp_path / "page.html", defaults=defaults)).page
    drawn = "[...document.querySelectorAll('#panel-overview figure .metric')].map((each) => each.textContent)"
    assert page.evaluate(drawn) == ["reward/mean", "clip/tokens"]
    page.click("#tab-metrics")
    page.fill("#panel-metrics .search", "staleness")
    assert page.inner_text(".constants") == "Staleness: mean staleness/mean\n0"
    assert page.locator("#panel-metrics figure:visible").count() == 0
    assert page.evaluate("smoothed([0, null, 1, 1], 0.5)") == [0, None, 1 / 1.5, 1.5 / 1.75]
    page.click("#tab-recipe")
    assert page.locator(".recipe pre:visible").all_inner_texts() == [
        "env:\n  id: desk\ncredit:\n  gamma: 0.5\nrollout:\n  num_groups: 1\n  group_size: 2\n"
    ]


def test_a_page_that_is_served_shows_what_a_run_adds(tmp_path: Path, open_page: Open) -> None:
    run = make_run(tmp_path / "run", train={"steps": 5})
    server = Server(run)
    try:
        watched = open_page(f"http://127.0.0.1:{server.port}/")
        page = watched.page
        page.click("#tab-rollouts")
        page.wait_for_selector(".tokens")
        assert page.locator(".row").count() == 2
        page.keyboard.press("j")
        seen = page.inner_text(".pane h2")
        run.add_metrics({"step": 4.0, "reward/mean": 0.125})
        run.add_rollouts(4, [member(7, reward=-1.0, step=4, group_id="train/000004")])
        until(page, "document.querySelectorAll('.row').length === 3")
        assert page.inner_text(".pane h2") == seen  # what is looked at stays
        selected = "[...document.querySelectorAll('.row')].findIndex((each) => each.ariaSelected === 'true')"
        assert page.evaluate(selected) == 2
        page.keyboard.press("k")
        assert page.evaluate(selected) == 1
        page.click("#tab-overview")
        until(page, "document.querySelector('figure').ariaLabel === 'Training: reward, from 0 to 0.125'")
        assert page.inner_text(".top .live") == "live"
        os.utime(run.path / "metrics.jsonl", (time.time() - 3 * 3600,) * 2)
        until(page, "document.querySelector('.top .state')?.textContent === 'last step 3 hours ago'")
        page.click("#tab-metrics")
        page.type("#panel-metrics .search", "rew")
        run.add_metrics({"step": 5.0, "reward/mean": 0.25})
        until(page, "document.querySelector('#panel-metrics figure').ariaLabel === 'Training: reward, from 0 to 0.25'")
        assert page.inner_text(".top .state") == "finished"
        page.keyboard.type("ard")  # what was typed, and where, stays too
        assert page.input_value("#panel-metrics .search") == "reward"
        assert page.locator("#panel-metrics figure:visible .name").all_inner_texts() == ["Training: reward"]
        assert watched.errors == []
        assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in watched.requests)
        server.process.kill()
        until(page, "document.querySelector('.top').classList.contains('unreachable')")
    finally:
        server.process.kill()
        server.process.wait()
