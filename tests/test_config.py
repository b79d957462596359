import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from agentrl.chat import AutoConfig, ChatMLConfig, RendererConfig, TemplateConfig
from agentrl.data.files import dump_yaml, parse_yaml
from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe, load_recipe, plan, warnings
from agentrl.recipe.plugin import Plugin
from agentrl.report.folder import RunFolder
from tests.support.each import each

RECIPES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def load(file: Path, text: str, *overrides: str) -> Recipe:
    file.write_text(text, encoding="utf-8")
    return load_recipe(file, overrides)


def message(file: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, text, *overrides)
    return str(caught.value)


def sections(
    model: type[BaseModel] = Recipe, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the path of each section of the tree, with its fields; but for those of plug-ins."""
    if issubclass(model, Plugin):
        return
    yield path, list(model.model_fields)
    for name, info in model.model_fields.items():
        is_many = get_origin(info.annotation) in (tuple, dict)  # which is no section
        within = () if is_many else get_args(info.annotation)
        for part in (info.annotation, *within):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from sections(part, (*path, name))


SECTIONS = list(sections())


def misspelt(name: str) -> str:
    return f"{name[:-1]}{'x' if name[-1] != 'x' else 'y'}"


def test_the_tree_has_the_sections_of_a_run() -> None:
    top = [
        "agent",
        "agent.tasks",
        "deployment",
        "env",
        "evaluation",
        "loss",
        "loss.calibrated",
        "loss.covariance",
        "loss.gate",
        "loss.kernel",
        "loss.nll",
        "model",
        "model.local",
        "model.lora",
        "report",
        "rollout",
        "rollout.branches",
        "rollout.curriculum",
        "rollout.history",
        "signals",
        "signals.critic",
        "train",
        "warmup",
    ]
    assert sorted(".".join(path) for path, _ in SECTIONS if path) == top


@pytest.mark.slow
@each(("path", "fields"), SECTIONS)
def test_a_misspelt_field_at_any_level_is_an_error_with_the_nearest_name(
    path: tuple[str, ...], fields: list[str], file: Path
) -> None:
    for field in fields[::4]:  # of a section the first, and some more
        wrong = misspelt(field)
        if wrong in fields:
            continue
        nested = f"{{{wrong}: 1}}"
        for section in reversed(path):
            nested = f"{{{section}: {nested}}}"
        dotted = ".".join((*path, wrong))
        in_yaml = message(file, nested)
        assert in_yaml.startswith(f"{dotted}: no such field. ")
        on_command_line = message(file, "{}", f"--{dotted}", "1")
        assert on_command_line.startswith(f"--{dotted}: no such option. ")
        if len(field) < 5:  # one letter of so few is too much to guess the rest
            continue
        assert in_yaml.endswith(f"Did you mean {field!r}?")
        if (*path, field) not in dict(SECTIONS) and field != "engine":  # options are fields, sections are not
            assert on_command_line.endswith(f"Did you mean '--{'.'.join((*path, field))}'?")


def test_unknown_names_read_well(file: Path) -> None:
    assert message(file, "rollout: {group_sise: 4}") == "rollout.group_sise: no such field. Did you mean 'group_size'?"
    assert message(file, "{}", "--group_size=4", "--sed", "1") == (
        "--group_size: no such option. Did you mean '--rollout.group_size'?\n"
        "--sed: no such option. Did you mean '--seed'?"
    )
    assert message(file, "env: {zzz: 4}") == "env.zzz: no such field. Known: id, options, schedule, servers, wrappers."
    assert message(file, "{}", "--env.qqqqqqqq", "4") == (
        "--env.qqqqqqqq: no such option. Known: --env.id, --env.options, --env.schedule, --env.servers, --env.wrappers."
    )
    # Names of other libraries, in their sections.
    assert message(file, "{}", "--actor_rollout_ref.model.path", "x") == (
        "--actor_rollout_ref.model.path: no such option. Did you mean '--model.name_or_path'?"
    )
    assert message(file, "{}", "--model.name", "x").endswith("Did you mean '--model.name_or_path'?")
    assert message(file, "{}", "--scale_rewards", "x").endswith("mean \"credit.normalize, of the scheme 'uniform'\"?")
    # A slip of ours is told as that, though what stands below it has a name elsewhere.
    assert message(file, "{creditt: {scheme: gigpo, gamma: 0.9}}") == "creditt: no such field. Did you mean 'credit'?"
    assert message(file, "{lora: {rank: 8, lora_alpha: 16}}") == "lora: no such field. Did you mean 'model.lora'?"
    assert message(file, "{actor: {optim: {lr: 1}}, actor_rollout_ref: {model: {path: x}, rollout: {n: 8}}}") == (
        "actor.optim.lr: no such field. Did you mean 'train.learning_rate'?\n"
        "actor_rollout_ref.model.path: no such field. Did you mean 'model.name_or_path'?\n"
        "actor_rollout_ref.rollout.n: no such field. Did you mean 'rollout.group_size'?"
    )
    assert message(file, "{}", "stray") == "command line: unrecognized arguments: stray"


@each(
    ("text", "words"),
    [
        ("train: {steps: 0}", "train.steps: Input should be greater than 0 (got 0)"),
        ("seed: -1", "seed: Input should be greater than or equal to 0 (got -1)"),
        ("seed: 4294967296", "seed: Input should be less than 4294967296 (got 4294967296)"),
        (
            "rollout: {num_groups: 1.5}",
            "rollout.num_groups: Input should be a valid integer, got a number with a fractional part (got 1.5)",
        ),
        ("rollout: {top_p: 2}", "rollout.top_p: Input should be less than or equal to 1 (got 2)"),
        ("train: {precision: float16}", "train.precision: Input should be 'float32' or 'bfloat16' (got 'float16')"),
        (
            "model: {local: {vocab_size: 260}}",
            "model.local.vocab_size: Input should be greater than or equal to 261 (got 260)",
        ),
        (
            "model: {local: {num_heads: 3}}",
            "model.local.num_heads: 3 does not divide hidden_size: 128; set hidden_size to a multiple of 6",
        ),
        ("warmup: {skill: 1.1}", "warmup.skill: Input should be less than or equal to 1 (got 1.1)"),
        (
            "credit: {scheme: turn_return, gamma: 1.5}",
            "credit.gamma: Input should be less than or equal to 1 (got 1.5)",
        ),
        ("rollout: {temperature: .inf}", "rollout.temperature: must be a finite number (got inf)"),
        ("rollout: {temperature: 1.0e-320}", "rollout.temperature: Input should be from 0.01 to 100 (got 1e-320)"),
        (
            "rollout: {engine_timeout_s: 1.0e-320}",
            "rollout.engine_timeout_s: Input should be from 0.001 to 1e+09 (got 1e-320)",
        ),
        ("warmup: {learning_rate: 1.0e+308}", "warmup.learning_rate: Input should be from 1e-30 to 10 (got 1e+308)"),
        (
            "signals: {critic: {learning_rate: 11}}",
            "signals.critic.learning_rate: Input should be from 1e-30 to 10 (got 11)",
        ),
        ("train: {agreement: 1.0e+308}", "train.agreement: Input should be from 1e-12 to 1 (got 1e+308)"),
        (
            "model: {local: {initializer_std: 20}}",
            "model.local.initializer_std: Input should be from 0.001 to 10 (got 20)",
        ),
        ("train: {betas: [0.9, .nan]}", "train.betas.1: Input should be less than 1 (got nan)"),
        (
            "train: {stop_on: [collapse]}",
            "train.stop_on.0: Input should be 'zero_spread' or 'cut_off' (got 'collapse'). "
            "Did you mean 'train.on_collapse: stop'?",
        ),
        (
            "rollout: {group_rewards: [{reward: shorter, wieght: 1}]}",
            "rollout.group_rewards.0.wieght: no such field. Did you mean 'weight'?",
        ),
        ("rollout: 5", "rollout: expected a mapping of fields (got 5)"),
        ("rollout:", "rollout: expected a mapping of fields (got None)"),
    ],
)
def test_an_impossible_value_is_named_and_shown(text: str, words: str, file: Path) -> None:
    assert message(file, text) == words


def test_every_mistake_has_a_line_of_its_own(file: Path) -> None:
    text = "sed: 1\ntrain: {steps: many, learning_rate: -1}"
    assert message(file, text, "--rollout.num_groups", "-4").splitlines() == [
        "rollout.num_groups: Input should be greater than 0 (got '-4')",
        "train.steps: Input should be a valid integer, unable to parse string as an integer (got 'many')",
        "train.learning_rate: Input should be greater than 0 (got -1)",
        "sed: no such field. Did you mean 'seed'?",
    ]


@each(
    ("text", "words"),
    [
        (
            "rollout: {max_turn_tokens: 4000}",
            "rollout.max_turn_tokens: 4000 exceeds max_episode_tokens: 2048; lower it",
        ),
        (
            "rollout: {max_turn_tokens: 64, max_context_tokens: 64}",
            "rollout.max_turn_tokens: 64 leaves no room for a prompt in rollout.max_context_tokens: 64",
        ),
        (
            "{rollout: {num_groups: 1, group_size: 2}, train: {num_minibatches: 3}}",
            "train.num_minibatches: 3 is more than the 2 episodes of a step (rollout.num_groups * rollout.group_size); "
            "lower it",
        ),
        (
            "{rollout: {group_size: 1}, credit: {scheme: turn_return}}",
            "rollout.group_size: 1 gives every trajectory nothing to be compared with; raise it, or set credit.lone",
        ),
        (
            "{rollout: {group_size: 1}, credit: {scheme: judge, then: {scheme: turn_return}}}",
            "rollout.group_size: 1 gives every trajectory nothing to be compared with; raise it, or set credit.then.lone",
        ),
        (
            "{rollout: {group_size: 1}, credit: {scheme: shuffled, of: {scheme: gigpo}}}",
            "rollout.group_size: 1 gives every trajectory nothing to be compared with; raise it, or set credit.of.lone",
        ),
        (
            "{rollout: {group_size: 1}, credit: {scheme: turn_gae, fallback: uniform}}",
            "rollout.group_size: 1 gives every trajectory nothing to be compared with; raise it, or remove credit.fallback",
        ),
        (
            "{credit: {scheme: judge, then: {scheme: distill}}}",
            "credit.then: 'distill' reads no rewards; choose a scheme that does",
        ),
        ("evaluation: {pass_at: [1, 8]}", "evaluation.pass_at: 8 needs as many samples, got samples: 1"),
        (
            "loss: {mismatch: mask}",
            "loss.mismatch: mask corrects what anchor: behavior has in its ratio already; set anchor: recomputed "
            "or sampled, or mismatch: 'off'",
        ),
        (
            "loss: {trust: kernel, kernel: {positive: [30, 0.1]}}",
            "loss.kernel.positive: [30, 0.1] gives weights of up to e^141, beyond float32; bring c1 and c2 "
            "closer together",
        ),
        (
            "loss: {trust: kernel, kernel: {negative: [1.0e-2, 90]}}",
            "loss.kernel.negative: [0.01, 90] gives weights of up to e^90, beyond float32; bring c1 and c2 "
            "closer together",
        ),
        (
            "rollout: {top_p: 0.9}",
            "rollout.top_p: 0.9 cuts the support off, so importance ratios would be wrong; train with top_p: 1 and lower "
            "the temperature instead",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_both_named(text: str, words: str, file: Path) -> None:
    assert message(file, text) == words


def test_an_option_of_other_credit_schemes_is_answered_with_their_names(file: Path) -> None:
    for text in ("{credit: {scheme: uniform, gamma: 0.5}}", "{credit: {gamma: 0.5}}"):
        told = message(file, text)
        assert told.startswith(
            "credit.gamma: 'uniform' has no such option; remove it, or set credit.scheme to one that has"
        )
        assert "'turn_return'" in told
        assert "'uniform'" not in told.partition("one that has it: ")[2]
    assert load(file, "{credit: {lone: keep}}").credit == {"scheme": "uniform", "lone": "keep"}


def test_a_lone_trajectory_is_named_before_the_number_of_minibatches(file: Path) -> None:
    told = message(file, "{rollout: {group_size: 1, num_groups: 2}}")
    assert told == (
        "rollout.group_size: 1 gives every trajectory nothing to be compared with; raise it, or set credit.lone"
    )


def test_one_trajectory_a_group_is_allowed_where_credit_says_what_to_do(file: Path) -> None:
    recipe = load(file, "{rollout: {group_size: 1}, credit: {scheme: turn_return, lone: keep}}")
    assert recipe.rollout.group_size == 1


def test_the_rule_for_one_trajectory_is_that_of_the_innermost_scheme_and_of_the_fallback(file: Path) -> None:
    for scheme in ("scheme: judge", "scheme: shuffled", "scheme: judge, fallback: uniform"):
        words = message(file, f"{{rollout: {{group_size: 1}}, credit: {{{scheme}}}}}")
        assert words.startswith("rollout.group_size: 1 gives every trajectory nothing to be compared with")
    kept = "credit: {scheme: judge, then: {scheme: turn_return, lone: keep}, fallback: uniform}"
    assert load(file, f"{{rollout: {{group_size: 1}}, {kept}}}").rollout.group_size == 1


@each(
    ("text", "words"),
    [
        ("{scheme: turn_return, gama: 0.5}", "credit.gama: 'turn_return' has no such option. Did you mean 'gamma'?"),
        (
            "{scheme: turn_retrun}",
            "credit.scheme: no 'turn_retrun' is installed. Did you mean 'turn_return'? Or give it as 'module:Class'.",
        ),
        ("{scheme: null}", "credit.scheme: expected the name of a credit scheme, got None"),
        ("{scheme: uniform, fallback: none}", "credit.fallback: the only fallback is 'uniform', got 'none'"),
    ],
)
def test_mistakes_in_credit_are_found_when_the_recipe_is_read(text: str, words: str, file: Path) -> None:
    assert message(file, f"credit: {text}") == words


@pytest.mark.slow
@each(
    ("overrides", "path", "value"),
    [
        (["--seed", "7"], "seed", 7),
        (["--rollout.group_size", "4"], "rollout.group_size", 4),
        (["--rollout.group_size=4"], "rollout.group_size", 4),
        (["--rollout.group_size", "3", "--rollout.group_size", "4"], "rollout.group_size", 4),
        (["--rollout", '{"group_size": 4}'], "rollout.group_size", 4),
        (["--model.local.hidden_size", "32"], "model.local.hidden_size", 32),
        (["--train.learning_rate", "1e-5"], "train.learning_rate", 1e-5),
        (["--engine.lockstep", "true"], "engine.lockstep", True),
        (["--engine.lockstep=false"], "engine.lockstep", False),
        (["--train.betas", "[0.8, 0.9]"], "train.betas", (0.8, 0.9)),
        (["--evaluation.pass_at", "1,4"], "evaluation.pass_at", (1, 4)),
        (["--evaluation.pass_at", "1", "--evaluation.pass_at", "2"], "evaluation.pass_at", (1, 2)),
        (["--report.trackers", "[]"], "report.trackers", ()),
        (["--report.trackers", "wandb"], "report.trackers", ("wandb",)),
        (["--loss.clip_low", "null"], "loss.clip_low", None),
        (["--model.name_or_path", "null"], "model.name_or_path", None),
        (["--run_dir", "there"], "run_dir", Path("there")),
        (["--chat.thinking", "drop"], "chat.thinking", "drop"),
        (["--chat.date=2031-05-17"], "chat.date", date(2031, 5, 17)),
        (["--chat", '{"date": "2031-05-17"}'], "chat.date", date(2031, 5, 17)),
        (["--credit.gamma", "0.5"], "credit.gamma", 0.5),
        (["--credit.gamma=.5"], "credit.gamma", 0.5),
        (["--credit.leave_one_out", "false"], "credit.leave_one_out", False),
        (["--env.options.num_operations", "3"], "env.options.num_operations", 3),
        (["--env.options.turn_rewards=false"], "env.options.turn_rewards", False),
        (["--env.options.seed_words", "[a, b]"], "env.options.seed_words", ["a", "b"]),
        (["--env.options.limits.low", "null"], "env.options.limits", {"low": None}),
        (["--env.options.day", "2020-01-01"], "env.options.day", "2020-01-01"),
    ],
)
def test_the_command_line_wins_over_the_recipe_and_leaves_the_rest(
    overrides: list[str], path: str, value: Any, file: Path
) -> None:
    text = """
seed: 1
run_dir: here
env: {options: {num_operations: 2, max_operand: 5, prompt: short}}
model: {name_or_path: a/b, local: {hidden_size: 64, num_layers: 3}}
warmup: {batch_size: 4, num_demonstrations: 9, learning_rate: 0.1}
engine: {lockstep: false}
rollout: {group_size: 2, max_turns: 3}
credit: {scheme: turn_return, gamma: 0.9, lone: keep}
loss: {clip_low: 0.1}
train: {learning_rate: 0.1, betas: [0.5, 0.5]}
evaluation: {samples: 4, pass_at: [2]}
report: {trackers: [tensorboard]}
"""
    before, after = load(file, text).model_dump(), load(file, text, *overrides).model_dump()
    *sections, name = path.split(".")
    for section in sections:
        before[section], after[section] = dict(before[section]), dict(after[section])
        before, after = before[section], after[section]
    assert after[name] == value
    assert type(after[name]) is type(value)
    whole, changed = load(file, text).model_dump(), load(file, text, *overrides).model_dump()
    assert {key for key in whole if whole[key] != changed[key]} <= {path.split(".")[0]}
    assert {key: before[key] for key in before if key != name} == {key: after[key] for key in after if key != name}


def test_options_of_one_nested_mapping_are_laid_over_each_other(file: Path) -> None:
    text = "{credit: {scheme: judge, then: {scheme: group_gae}}, env: {options: {limits: {low: 1, high: 2}}}}"
    options = ["--credit.then.lam", "0", "--env.options.limits.low", "3", "--credit.then.gamma=.9"]
    recipe = load(file, text, *options, "--env.options.limits.step", "4")
    assert recipe.credit == {"scheme": "judge", "then": {"scheme": "group_gae", "lam": 0, "gamma": 0.9}}
    assert recipe.env.options == {"limits": {"low": 3, "high": 2, "step": 4}}


@each("option", ["--rollout.group_size", "--credit.gamma", "--env.options.num_operations"])
def test_an_option_without_a_value_is_named(option: str, file: Path) -> None:
    assert message(file, "credit: {scheme: turn_return}", option) == f"{option}: needs a value"


def test_a_value_that_cannot_be_read_is_named(file: Path) -> None:
    assert message(file, "train: {process_timeout_s: 1.0e+300}").startswith(
        "train.process_timeout_s: Input should be less"
    )
    assert (
        message(file, "{}", "--credit.gamma=[")
        == "--credit.gamma: '[' is not valid YAML: expected the node content, but found '<stream end>' (line 1, column 2)"
    )
    assert message(file, "{}", "--rollout.group_size", "four") == (
        "rollout.group_size: Input should be a valid integer, unable to parse string as an integer (got 'four')"
    )


def test_another_environment_drops_the_options_of_the_former_one(file: Path) -> None:
    text = "env: {id: calculator, options: {num_operations: 3}}"
    assert load(file, text, "--env.id", "key_door").env.options == {}
    assert load(file, text, "--env.id", "key_door", "--env.options.num_boxes", "4").env.options == {"num_boxes": 4}
    assert load(file, text, "--env.id", "calculator").env.options == {"num_operations": 3}
    assert load(file, text.replace("id: calculator, ", ""), "--env.id", "calculator").env.options == {
        "num_operations": 3
    }


def test_another_credit_scheme_drops_the_options_of_the_former_one(file: Path) -> None:
    text = "credit: {scheme: turn_return, gamma: 0.9}"
    assert load(file, text, "--credit.scheme", "uniform").credit == {"scheme": "uniform"}
    kept = load(file, text, "--credit.scheme", "turn_return", "--credit.ddof", "0").credit
    assert kept == {"scheme": "turn_return", "gamma": 0.9, "ddof": 0}


class Loud(RendererConfig):
    """A stranger's renderer."""

    volume: float = 1.0
    tones: tuple[int, ...] = ()

    def build(self, tokenizer: Any, *, name: str = "") -> Any:
        raise NotImplementedError


LOUD = f"{__name__}:Loud"


def test_a_plug_in_brings_the_fields_of_its_section(file: Path) -> None:
    assert type(load(file, "{}").chat) is AutoConfig
    assert type(load(file, "chat: {renderer: chatml}").chat) is ChatMLConfig
    chat = load(file, "chat: {renderer: template, system: Be brief.}").chat
    assert chat == TemplateConfig(system="Be brief.")
    recipe = load(file, f"chat: {{renderer: '{LOUD}', volume: 2}}", "--chat.tones", "[1, 2]")
    assert recipe.chat == Loud(renderer=LOUD, volume=2, tones=(1, 2))
    assert load(file, recipe.model_dump_json()) == recipe
    for spec in ("{thinking: drop}", "{renderer: auto, date: 2031-05-17}"):  # of whichever auto chooses
        assert type(load(file, f"chat: {spec}").chat) is AutoConfig


@each(
    ("text", "overrides", "words"),
    [
        (
            "{zzz: 4}",
            (),
            "chat.zzz: 'auto' has no such option. Known: date, renderer, system, template, template_variables, "
            "thinking, tool_form.",
        ),
        ("{dat: 2031-05-17}", (), "chat.dat: 'auto' has no such option. Did you mean 'date'?"),
        (
            "{renderer: chatml, date: 2031-05-17}",
            (),
            "chat.date: 'chatml' has no such option; 'auto' and 'template' have: remove it, or set chat.renderer",
        ),
        ("{}", ("--chat.dat", "2031-05-17"), "chat.dat: 'auto' has no such option. Did you mean 'date'?"),
        (
            "{renderer: chatnl}",
            (),
            "chat.renderer: no 'chatnl' is installed. Did you mean 'chatml'? Or give it as 'module:Class'.",
        ),
        (
            "{renderer: 'agentrl.chat:ChatMLRenderer'}",
            (),
            "chat.renderer: 'agentrl.chat:ChatMLRenderer' is <class 'agentrl.chat.chatml.ChatMLRenderer'>, not a subclass of "
            "agentrl.chat.renderer.RendererConfig",
        ),
        (
            "{renderer: 'agentrl.chat:RendererConfig'}",
            (),
            "chat.renderer: 'agentrl.chat:RendererConfig' does not define build",
        ),
        ("{renderer: 4}", (), "chat.renderer: expected an installed name or 'module:Class', got 4"),
        (
            "{thinking: maybe}",
            (),
            "chat.thinking: Input should be 'keep', 'drop_at_user' or 'drop' (got 'maybe')",
        ),
        ("5", (), "chat: expected a mapping of fields (got 5)"),
        (
            f"{{renderer: '{LOUD}', volume: much}}",
            ("--chat.tones.0", "x"),
            "chat.volume: Input should be a valid number, unable to parse string as a number (got 'much')\n"
            "chat.tones: Input should be a valid tuple (got {'0': 'x'})",
        ),
    ],
)
def test_mistakes_in_the_section_of_a_plug_in_are_named(
    text: str, overrides: tuple[str, ...], words: str, file: Path
) -> None:
    assert message(file, f"chat: {text}", *overrides) == words


def test_another_plug_in_drops_the_fields_that_it_does_not_have(file: Path) -> None:
    text = "chat: {renderer: template, system: Be brief.}"
    assert load(file, text, "--chat.renderer", "chatml").chat == ChatMLConfig(system="Be brief.")
    assert load(file, text, "--chat.renderer", "auto").chat == AutoConfig(system="Be brief.")
    assert load(file, text, "--chat.renderer=chatml", "--chat.renderer=template").chat == load(file, text).chat


def test_there_are_shipped_recipes() -> None:
    assert "calculator.yaml" in [path.name for path in RECIPES]


@each("path", RECIPES)
def test_a_shipped_recipe_parses_and_comes_back_from_what_a_run_writes_down(path: Path, file: Path) -> None:
    recipe = load_recipe(path)
    assert load(file, recipe.model_dump_json()) == recipe  # JSON is YAML


def test_the_plan_says_what_a_step_amounts_to(file: Path) -> None:
    text = """
rollout: {num_groups: 3, group_size: 4, max_turns: 5, max_turn_tokens: 32}
train: {steps: 10, num_minibatches: 2, max_tokens_per_micro_batch: 900}
credit: {scheme: turn_return, gamma: 0.5}
loss: {unit: turn, trust: fixed, clip_high: 0.01}
evaluation: {num_tasks: 20, samples: 2}
"""
    assert plan(load(file, text)) == {
        "episodes per step": "12 (3 groups of 4)",
        "turns per episode": "at most 5, of at most 32 tokens each",
        "updates per step": "at most 2, on about 6 trajectories each",
        "tokens per micro-batch": "at most 900, shared ones once",
        "steps": "10 (at most 20 updates)",
        "credit": "scheme turn_return, gamma 0.5",
        "loss": "gspo_token: turn ratios, clip [0.997, 1.01], trajectory-mean",
        "evaluation": "20 evaluation tasks, 2 episodes each",
    }


def test_a_section_that_is_given_no_mapping_is_named(file: Path) -> None:
    assert message(file, "{}", "--rollout=text") == (
        "--rollout: expected JSON, such as {}; a field of it is --rollout.FIELD VALUE"
    )
    words = message(file, "{}", f"--rollout={'[' * 3000 + ']' * 3000}")
    assert words == f"--rollout: '{'[' * 80}' nests deeper than 200, or repeats itself too often; write it out flat"


def test_a_file_that_is_no_recipe_is_named(tmp_path: Path) -> None:
    def words(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_recipe(path)
        return str(caught.value)

    file = tmp_path / "recipe.yaml"
    assert words(file) == f"cannot read the recipe {file}: No such file or directory"
    assert words(tmp_path) == f"cannot read the recipe {tmp_path}: Is a directory"
    file.write_bytes(b"\xff\xfe\x00")
    assert words(file).startswith(f"the recipe {file} is not valid YAML: 'utf-8' codec can't decode")
    assert message(file, "train: [") == (
        f"the recipe {file} is not valid YAML: expected the node content, but found '<stream end>' (line 1, column 9)"
    )
    assert message(file, "- train") == f"the recipe {file} must be a mapping of sections, got list"
    assert message(file, "# nothing yet") == f"the recipe {file} must be a mapping of sections, got NoneType"


@each(
    ("text", "words"),
    [
        ("010", "'010' is 8 in YAML 1.1 and something else in 1.2; write 8, or '010' in quotes"),
        ("1_0", "'1_0' is 10 in YAML 1.1 and something else in 1.2; write 10, or '1_0' in quotes"),
        ("1:30", "'1:30' is 90 in YAML 1.1 and something else in 1.2; write 90, or '1:30' in quotes"),
        ("0b11", "'0b11' is 3 in YAML 1.1 and something else in 1.2; write 3, or '0b11' in quotes"),
        ("1_0.5", "'1_0.5' is 10.5 in YAML 1.1 and something else in 1.2; write 10.5, or '1_0.5' in quotes"),
        ("1_0e2", "'1_0e2' is 1000.0 in YAML 1.1 and something else in 1.2; write 1000.0, or '1_0e2' in quotes"),
        ("off", "'off' is false in YAML 1.1 and something else in 1.2; write false, or 'off' in quotes"),
        ("Yes", "'Yes' is true in YAML 1.1 and something else in 1.2; write true, or 'Yes' in quotes"),
    ],
)
def test_what_two_versions_of_yaml_read_differently_is_refused(text: str, words: str, file: Path) -> None:
    told = message(file, f"train:\n  steps: {text}")
    assert told == f"the recipe {file} is not valid YAML: {words} (line 2, column 10)"


def test_values_that_all_versions_of_yaml_read_alike_are_read() -> None:
    text = "[0, -7, +7, 0x1f, 1.5, .5, 1e-3, 1.e+3, .inf, '010', '1_0', 09, true, False, 'off', y]"
    inf = float("inf")
    read = parse_yaml(text, where="it")
    assert read == [0, -7, 7, 31, 1.5, 0.5, 1e-3, 1000.0, inf, "010", "1_0", "09", True, False, "off", "y"]
    assert parse_yaml(dump_yaml(read), where="it") == read


def test_a_key_that_stands_twice_is_refused_because_yaml_would_drop_one(file: Path) -> None:
    words = message(file, "train: {steps: 1}\nseed: 2\ntrain: {num_minibatches: 1}")
    assert words.startswith(f"the recipe {file} is not valid YAML: 'train' is there twice (line 3, column 1)")
    merged = load(file, "env: {options: &base {a: 1, b: 2}}\nrollout: {max_turns: 3}")
    assert merged.env.options == {"a": 1, "b": 2}
    assert load(file, "env: {options: {<<: {a: 1, b: 2}, b: 3}}").env.options == {"a": 1, "b": 3}


def test_options_of_an_environment_are_the_same_in_a_run_that_is_resumed(file: Path) -> None:
    text = (
        "env: {options: {since: 2024-01-01, levels: {1: easy}}, schedule: [{from_step: 2, options: {at: 2024-01-02}}]}"
    )
    begun = load(file, text)
    folder = RunFolder.create(file.parent / "run", begun.model_dump(mode="json"))
    assert load_recipe(folder.config()).env == begun.env
    assert begun.env.options == {"since": "2024-01-01", "levels": {"1": "easy"}}


@each(
    ("options", "words"),
    [
        ("{x: .inf}", "env.options: expected finite numbers"),
        ("{x: {1: a, true: b, null: c}}", r"env.options: the value\['x'\] has the key NoneType None"),
        ("{x: !!binary aGk=}", r"env.options: the value\['x'\] is bytes b'hi'; give plain data"),
    ],
)
def test_options_that_no_file_of_a_run_can_hold_are_refused(options: str, words: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(file, f"env: {{options: {options}}}")


@each(
    ("option", "value"),
    [
        ("rollout.group_rewards", "[{reward: shorter}]"),
        ("env.wrappers", "[{id: time_limit, max_turns: 5}]"),
        ("env.schedule", "[{from_step: 1, options: {num_rooms: 2}}]"),
        ("rollout.curriculum", "{visits: 2}"),
        ("credit", "{scheme: action_values, gamma: 1, lam: 0.5}"),
    ],
)
def test_values_on_the_command_line_are_written_as_in_a_recipe(option: str, value: str) -> None:
    *sections, last = option.split(".")
    nested: dict[str, Any] = {last: yaml.safe_load(value)}
    for section in reversed(sections):
        nested = {section: nested}
    for arguments in (
        [f"--{option}", value],
        [f"--{option}={value}"],
        [f"--{option}", json.dumps(yaml.safe_load(value))],
    ):
        assert load_recipe(None, arguments) == load_recipe(nested)


@each("value", ["[x]", "{x} y", "[x] y"])
def test_a_text_may_look_like_a_list(value: str) -> None:
    assert load_recipe(None, ["--model.name_or_path", value]).model.name_or_path == value
    assert load_recipe(None, [f"--run_dir={value}"]).run_dir == Path(value)


@each(
    ("sections", "words"),
    [
        ({"model": {"name_or_path": "m"}, "train": {"learning_rate": 3e-4}}, "train.learning_rate: 0.0003 suits"),
        ({"model": {"name_or_path": "m"}, "train": {"learning_rate": 2e-5}}, None),
        ({"model": {"name_or_path": "m", "lora": {}}, "train": {"learning_rate": 3e-4}}, None),
        ({"train": {"learning_rate": 3e-4}}, None),
        ({"train": {"target_kl": 0.02}}, "train.target_kl: 0.02 nats a token are up to 41 on an episode"),
        ({"train": {"target_kl": 0.02}, "rollout": {"max_turn_tokens": 32, "max_episode_tokens": 512}}, None),
    ],
)
def test_likely_mistakes_are_named_before_anything_starts(sections: dict[str, Any], words: str | None) -> None:
    found = warnings(load_recipe(sections))
    assert [warning.startswith(words or "") for warning in found] == ([True] if words else [])
