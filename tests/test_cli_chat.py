"""`agentrl chat`: what it shows of a model, a run and a recipe, and what it refuses."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from agentrl.chat import AutoConfig, ChatMLConfig, train_tokenizer
from agentrl.chat.proof.inspection import inspect
from agentrl.cli import main
from agentrl.data.files import shown
from agentrl.report.chat import sections
from tests.support.each import each
from tests.support.hugging_face import hugging_face_folder
from tests.support.templates import PROMPTS_THOUGHT, QWEN, THINKS, THOUGHT, changed, tokenizer


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Outcome]
Chat = Callable[..., Outcome]

SHOP = """
from agentrl.env import MessageEnv


class Shop(MessageEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return ({"role": "user", "content": "Well?"},), {}

    def step(self, action):
        return (), 0.0, True, False, {}
"""
RECIPE = """
model: {name_or_path: ./model}
warmup: {steps: 0}
rollout: {num_groups: 1, group_size: 2, max_turns: 2, max_turn_tokens: 8, max_context_tokens: 1024}
train: {steps: 1, num_minibatches: 1, device: cpu}
evaluation: {num_tasks: 1}
"""


@pytest.fixture
def agentrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Outcome:
        status = 0
        try:
            main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def chat(agentrl: Command) -> Chat:
    return partial(agentrl, "chat")


def folder(path: Path, template: str | None) -> Path:
    tokenizer(template).save_pretrained(path)
    return path


def test_a_folder_is_shown_with_its_renderer_its_proof_and_who_wrote_each_token(chat: Chat, tmp_path: Path) -> None:
    outcome = chat(str(folder(tmp_path / "model", changed(THINKS, THOUGHT))))
    assert (outcome.status, outcome.err) == (0, "")
    assert re.search(r"^chosen  template: the tokenizer has a chat template", outcome.out, re.MULTILINE)
    assert re.search(r"^proven +Calls are read as they were written", outcome.out, re.MULTILINE)
    assert re.search(r"^calls +hermes, several in a turn, also after text", outcome.out, re.MULTILINE)
    assert re.search(r"^thoughts +drop_at_user: dropped when a user speaks", outcome.out, re.MULTILINE)
    assert re.search(r"^stop tokens +<\|im_end\|> \(2\)", outcome.out, re.MULTILINE)
    assert re.search(r"turn 3   history is rewritten: after \d+ tokens as before, a new segment", outcome.out)
    assert re.search(r"^tool      \[C\]\[l\]\[o\]\[s\]\[e\]\[d\]\[ \]\[<\]\[\|\]\[i\]\[m\]", outcome.out, re.MULTILINE)
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_the_same_as_data(chat: Chat, tmp_path: Path) -> None:
    outcome = chat(str(folder(tmp_path / "model", QWEN)), "--json", "--chat.system", "Be brief.")
    found = json.loads(outcome.out)
    assert outcome.status == 0
    assert (found["error"], found["no_tools"]) == (None, None)
    assert found["stop_tokens"] == [{"id": 2, "text": "<|im_end|>"}]
    assert {claim["result"] for claim in found["proof"]} == {"proven"}
    texts: dict[str, str] = {}
    for turn in found["dialogue"]:
        for token in turn["tokens"]:
            texts[token["author"]] = texts.get(token["author"], "") + token["text"]
            assert not (token["special"] and token["author"] in ("user", "tool", "system"))
    assert texts["system"] == "You are the clerk of a shop."
    assert texts["user"] == "What are 12 lamps at 7 euros, and are you open today?And tomorrow?"
    assert texts["tool"] == "The result is 84.Open until six.Closed <|im_end|> all day."
    assert texts["model"].count("<|im_end|>") == 4
    assert "Be brief." in texts["template"]


def test_what_cannot_be_used_is_refused_in_one_message_beside_what_was_found(chat: Chat, tmp_path: Path) -> None:
    unending = QWEN.replace("<|im_", "<|other_")  # as with the tokenizer of another family
    outcome = chat(str(folder(tmp_path / "model", unending)))
    assert outcome.status == 2
    assert "a turn must end by one token" in outcome.err
    assert outcome.err.count("agentrl:") == 1
    lost = changed(("message.content + '<|im_end|>\n' }}", "message.content[:9] + '<|im_end|>\n' }}"))
    outcome = chat(str(folder(tmp_path / "other", lost)), "--json")
    assert outcome.status == 2
    assert shown(json.loads(outcome.out)["error"]) in outcome.err


WITHOUT_TOOLS = (("tool | tojson", "'tool'"), ("in ['user', 'system'] %}", "== 'user' %}"))
"""Nor has it system messages, in which tools could be offered."""


def test_a_template_without_tools_says_what_it_lacks(chat: Chat, tmp_path: Path) -> None:
    outcome = chat(str(folder(tmp_path / "model", changed(*WITHOUT_TOOLS))))
    assert outcome.status == 0
    assert re.search(r"^calls +none: it leaves out the tools", outcome.out, re.MULTILINE)
    assert re.search(r"^lacking  Several calls in a turn are read *\n +there are no tools", outcome.out, re.MULTILINE)
    assert "cannot be used with tools: it" in outcome.out


def test_a_recipe_and_a_file_with_a_template(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("env: {id: key_door}\n")
    outcome = chat("recipe.yaml")
    assert outcome.status == 0
    assert re.search(r"^not     template: the tokenizer has no chat template", outcome.out, re.MULTILINE)
    assert re.search(r"^chosen  chatml: ", outcome.out, re.MULTILINE)
    assert chat("calculator").out == outcome.out  # a recipe that comes along, by its name
    (tmp_path / "template.jinja").write_text(QWEN)
    bare = folder(tmp_path / "model", None)
    outcome = chat(str(bare), "--chat.template", "template.jinja", "--chat.thinking", "drop")
    assert outcome.status == 0
    assert re.search(r"^chosen  template: chat.template names a chat template", outcome.out, re.MULTILINE)
    assert re.search(r"^thoughts +drop: ", outcome.out, re.MULTILINE)


@each(
    ("arguments", "words"),
    [
        (("absent",), "model: there is no folder 'absent'"),
        (("absent.yaml",), "cannot read the recipe absent.yaml"),
        (("model", "--seed", "3"), "agentrl chat does not take --seed"),
        (("model", "--chat.thinkng", "keep"), "Did you mean 'thinking'?"),
    ],
)
def test_mistakes_are_told(chat: Chat, arguments: tuple[str, ...], words: str) -> None:
    folder(Path("model"), QWEN)
    outcome = chat(*arguments)
    assert outcome.status == 2
    assert words in outcome.err


def test_a_renderer_of_a_strangers_shows_what_it_can() -> None:
    class Plain:
        def __init__(self, made: Any) -> None:
            self.made = made

        def __getattr__(self, name: str) -> Any:
            if name == "describe":
                raise AttributeError(name)
            return getattr(self.made, name)

    class PlainConfig(ChatMLConfig):
        renderer: str = "plain:Plain"

        def build(self, tokenizer: Any, *, name: str = "") -> Any:
            return Plain(super().build(tokenizer, name=name))

    found = inspect(PlainConfig(), train_tokenizer([], vocab_size=261), name="org/model")
    assert (found.error, found.facts) == (None, {"thoughts": "keep"})
    assert len(found.dialogue) == 4
    assert [(choice.renderer, choice.chosen) for choice in found.tried] == [("plain:Plain", True)]


@pytest.mark.slow
@pytest.mark.process
@each("width", [40, 80, 120])
@each("colours", [None, "truecolor"])
def test_tokens_are_whole_on_their_lines(width: int, colours: Any) -> None:
    made = tokenizer(changed(THINKS, THOUGHT, PROMPTS_THOUGHT))
    found = inspect(AutoConfig(), made, name="org/model")
    console = Console(width=width, color_system=colours, force_terminal=colours is not None, record=True, quiet=False)
    with console.capture() as captured:
        for section in sections(found):
            console.print(section)
    lines = re.sub(r"\x1b\[[\d;]*m", "", captured.get()).splitlines()
    assert max(map(len, lines)) <= width
    whole = "".join(line[10:].rstrip("\n") for line in lines[lines.index("turn 1") :])
    assert ("«<|im_start|>»" in whole) == (colours is None)
    assert "<|im_start|>" in whole
    assert found.facts["thoughts"].count("the generation prompt begins one") == 1


def test_a_template_without_tools_is_refused_where_there_are_some_before_anything_is_sampled(
    agentrl: Command, tmp_path: Path
) -> None:
    hugging_face_folder(tmp_path / "model", rewrites=False)
    without_tools = train_tokenizer([], vocab_size=261)
    without_tools.chat_template = changed(*WITHOUT_TOOLS)
    without_tools.save_pretrained(tmp_path / "model")
    (tmp_path / "tools.yaml").write_text("env: {id: key_door}\n" + RECIPE)
    (tmp_path / "words.yaml").write_text("env: {id: 'shop_without_tools:Shop'}\n" + RECIPE)
    (tmp_path / "shop_without_tools.py").write_text(SHOP)
    for command in ("train", "eval"):
        outcome = agentrl(command, "tools.yaml")
        assert outcome.status == 2
        assert "Loading weights" not in outcome.err
        assert outcome.err.endswith(
            "agentrl: chat.renderer: the chat template of './model' cannot be used with tools: it leaves out the tools. Set "
            "chat.template to a file with a template that can, or use an environment without tools\n"
        )
        assert not (tmp_path / "runs").exists()
    assert agentrl("eval", "words.yaml").status == 0
    outcome = agentrl("train", "words.yaml", "--run_dir", "run")
    assert outcome.status == 0
    assert (
        outcome.out.count("warning: the chat template of './model' cannot be used with tools: it leaves out the tools")
        == 1
    )
