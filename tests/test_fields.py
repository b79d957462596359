"""What `agentrl fields` says, the page and the schema made of it, and what foreign names are answered with."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from agentrl.cli import main
from agentrl.errors import ConfigError
from agentrl.recipe import config, foreign_names
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.recipe.fields import (
    Field,
    argument_docstrings,
    attribute_docstrings,
    find,
    model_schema,
    page,
    sections,
    type_words,
)
from agentrl.recipe.schema import recipe_schema, section_types
from tests.support.each import each

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples").glob("*.yaml"))


def field(path: str) -> Field:
    return next(f for section in sections() for f in section.fields if f.path == path)


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The fields of a tree that are no sections, found without the listing; but for plug-ins."""
    found = set()
    for name, info in model.model_fields.items():
        inner: Any = info.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found |= leaves(inner, f"{prefix}{name}.") if is_section else {prefix + name}
    return found


def test_every_field_of_the_recipe_is_there_and_has_a_sentence() -> None:
    listed = {f.path: f for section in sections() for f in section.fields}
    assert leaves(Recipe) - {"engine.name", "chat.renderer"} <= set(listed)  # what names a plug-in is in its sections
    assert {"engine.vllm", "engine.server.url", "chat.template_variables", "model.lora.rank"} <= set(listed)
    assert {"env.options.num_operations", "env.options.rewards", "env.options.server", "credit.gamma"} <= set(listed)
    assert [f.path for f in listed.values() if not f.sentence] == []


def test_a_field_says_type_bounds_unit_default_and_what_it_changes() -> None:
    timeout = field("rollout.env_timeout_s")
    assert (timeout.type, timeout.unit, timeout.default, timeout.on_resume) == ("float > 0", "seconds", "60", "kept")
    size = field("rollout.group_size")
    assert (size.type, size.default, size.on_resume) == ("int > 0, <= 1,000,000", "8", "sampled again")
    assert size.sentence == "Episodes per task."
    assert field("loss.clip_low").type == "float > 0, <= 1 | null"
    assert field("train.layout").type == "auto | tree | packed | padded"
    assert field("train.betas").type == "[float >= 0, < 1, float >= 0, < 1]"
    assert field("train.steps").on_resume == "kept with `schedule: constant`"
    assert field("evaluation.every").on_resume == "kept"  # as its whole section is
    assert field("env.options.tasks").default == ""


class Base(BaseModel):
    first: int = 0
    """Of the base."""
    second: int = 0


class Derived(Base):
    second: int = 0
    """Of the derived,
    on two lines."""
    third: dict[str, Any] = {}


def test_sentences_are_the_strings_under_fields() -> None:
    assert attribute_docstrings(Derived) == {"first": "Of the base.", "second": "Of the derived, on two lines."}
    assert attribute_docstrings(type("Typed", (), {})) == {}
    properties = model_schema(Derived)["properties"]
    assert [properties[name].get("description") for name in ("first", "second", "third")] == [
        "Of the base.",
        "Of the derived, on two lines.",
        None,
    ]


def test_arguments_are_described_by_their_docstring() -> None:
    def make(*, size: int = 3, name: str) -> None:
        """Make.

        Args:
            size: how
                large.
            name: whose.
        """

    assert argument_docstrings(make) == {"size": "how large.", "name": "whose."}


@each(
    ("schema", "words"),
    [
        ({"type": "array", "items": {"type": "string"}}, "list of str"),
        ({"$ref": "#/$defs/A"}, "section"),
        ({"$ref": "#/$defs/B"}, "a | b"),
        ({}, "any"),
        ({"type": "string", "format": "date"}, "date"),
        ({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}, "int >= 0 | null"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_words(schema, {"A": {"properties": {}}, "B": {"enum": ["a", "b"]}}) == words


@each(
    ("what", "titles", "paths"),
    [
        ("rollout.history", ["rollout.history"], ["rollout.history.tool_results", "rollout.history.turns"]),
        ("rollout.group_size", ["rollout"], ["rollout.group_size"]),
        ("group_size", ["rollout"], ["rollout.group_size"]),
        ("credit.gigpo", ["credit, with scheme: gigpo"], None),
        ("gigpo", ["credit, with scheme: gigpo"], None),
        ("kl_coeff", [], []),
    ],
)
def test_sections_and_fields_are_found_by_name(what: str, titles: list[str], paths: list[str] | None) -> None:
    found = find(what, sections())
    assert [section.title for section, _ in found] == titles
    if paths is not None:
        assert [f.path for _, fields in found for f in fields] == paths


def test_the_page_has_a_row_for_every_field() -> None:
    rows = re.findall(r"^## `([\w.]+)`|^\| `([\w.]+)` \|", page(sections()), re.MULTILINE)
    section, found = "", set()
    for title, name in rows:
        section = title or section
        if name:
            found.add(f"{section}.{name}" if section else name)
    assert found == {f.path for part in sections() for f in part.fields}


def test_the_schema_is_up_to_date() -> None:
    written = (ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8")
    assert json.loads(written) == recipe_schema(sections()), "make fields"


def test_the_types_of_sections_are_up_to_date() -> None:
    written = Path(config.__file__).with_name("sections.pyi").read_text(encoding="utf-8")
    assert ast.dump(ast.parse(written)) == ast.dump(ast.parse(section_types())), "make fields"


def test_the_table_of_algorithms_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    main(["algorithms", "--markdown"])
    page = (ROOT / "docs" / "ratio-units.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in page, "copy what `agentrl algorithms --markdown` prints"


@pytest.mark.slow
@each("path", RECIPES)
def test_a_shipped_recipe_names_its_schema_and_keeps_to_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    [where] = re.findall(r"\A# yaml-language-server: \$schema=(\S+)\n", text)
    schema = json.loads((path.parent / where).read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load(text), schema)


@cache
def validator() -> Any:
    return jsonschema.Draft202012Validator(recipe_schema(sections()))


@each(
    "text",
    [
        "{rolout: {}}",
        "{rollout: {group_sise: 4}}",
        "{rollout: {group_size: 0}}",
        "{credit: {scheme: turn_return, gama: 0.5}}",
        "{credit: {scheme: judge, then: {scheme: turn_return, gama: 0.5}}}",
        "{credit: {scheme: turn_retrun}}",
        "{chat: {dat: 2031-05-17}}",
        "{engine: {name: transformers, sleep: true}}",
        "{env: {options: {num_operation: 2}}}",
        "{env: {id: key_door, options: {num_operations: 2}}}",
        "{env: {wrappers: [{id: record, pat: x}]}}",
        "{model: {lora: {rang: 3}}}",
    ],
)
def test_the_schema_refuses_what_a_recipe_refuses(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(yaml.safe_load(text))


def test_the_schema_takes_what_strangers_bring() -> None:
    text = """
credit: {scheme: "my:Scheme", anything: 1}
chat: {renderer: "my:Renderer", volume: 2}
engine: {name: vllm_server, server: {url: "http://a:8000"}}
env: {id: "my:Env", options: {size: 3}, wrappers: [{id: "my:Wrapper", size: 1}, {id: time_limit, max_turns: 3}]}
evaluation: {env: {hard: {id: calculator, options: {num_operations: 5}}}}
model: {lora: {}}
"""
    validator().validate(yaml.safe_load(text))
    nested = {"credit": {"scheme": "judge", "then": {"scheme": "group_gae", "lam": 0}, "fallback": "uniform"}}
    validator().validate(nested)


def test_the_command_prints_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fields", "group_size"])
    assert capsys.readouterr().out.split("\n\n") == [
        "rollout",
        "  rollout.group_size   int > 0, <= 1,000,000   default 8\n    Episodes per task.\n"
        "    changes what is learned; on resume, episodes are sampled again",
        "",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["fields", "num_generations"])
    assert ended.value.code == 2
    assert "num_generations: no such section or field. Did you mean 'rollout.group_size'?" in capsys.readouterr().err


def words(text: str, tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(file)
    return str(caught.value)


@each(
    ("text", "meant"),
    [
        ("{num_generations: 4}", "rollout.group_size"),
        ("{train: {num_generations: 4}}", "rollout.group_size"),
        ("{rollout: {num_generations: 4}}", "rollout.group_size"),
        ("{lr: 1}", "train.learning_rate"),
        ("{loss: {beta: 1}}", "loss.kl_coefficient"),
        ("{kl: 1}", "loss.kl_coefficient"),
        ("{engine: {kl_coef: 1}}", "loss.kl_coefficient"),
        ("{credit: {scheme: uniform, Beta: 1}}", "loss.kl_coefficient"),
        ("{rollout: {max-completion-length: 1}}", "rollout.max_turn_tokens"),
        ("{epsilon: 1}", "loss.clip_low and loss.clip_high"),
        ("{epsilon_high: 1}", "loss.clip_high"),
        ("{importance_sampling_level: sequence}", "loss.unit: trajectory"),
        ("{importance_sampling_level: token}", "loss.unit"),
        ("{bf16: true}", "train.precision: bfloat16"),
        ("{dtype: bf16}", "train.precision: bfloat16"),
        ("{train: {precision: bf16}}", "bfloat16"),
        ("{loss: {unit: sequence}}", "trajectory"),
        ("{max_steps: 1}", "train.steps"),
        ("{train: {num_train_epochs: 1}}", "train.steps"),
        ("{credit: {scheme: grpo}}", "loss: grpo"),
        ("{credit: {scheme: GSPO}}", "loss: gspo"),
        ("{credit: grpo}", "loss: grpo"),
        ("{loss: geo_mean}", "loss: gmpo"),
        ("{algo: gspo}", "loss: gspo"),
        ("{loss_type: dapo}", "loss: dapo, with rollout.dynamic_sampling"),
        ("{policy_loss: {loss_mode: dppo_tv}}", "loss: dppo_tv"),
        ("{actor: {entropy_coeff: 0.1}}", "loss.entropy_coefficient"),
        ("{actor: {use_kl_loss: true}}", "loss.kl_coefficient"),
        ("{actor: {kl_loss_type: low_var_kl}}", "loss.kl_estimator: k3"),
        ("{loss: {kl_coefficient: 0.1, kl_estimator: low_var_kl}}", "k3"),
        ("{use_kl_in_reward: true}", "loss.kl_estimator: k1_reward"),
        ("{loss: {sft_coef: 0.1}}", "loss.nll: {coefficient: 0.1}"),
        ("{kl_cov_ratio: 0.002}", "loss.covariance: {rule: kl}"),
        ("{run_name: grpo}", "run_dir"),
        # a field's own name wins, wherever it stands
        ("{top_p: 1}", "rollout.top_p"),
        ("{temperature: 1}", "rollout.temperature' or 'evaluation.temperature"),
        ("{engine: {clip_low: 1}}", "loss.clip_low"),
        ("{credit: {scheme: uniform, clip_low: 1}}", "loss.clip_low"),
        ("{rollout: {group_sise: 4}}", "group_size"),
    ],
)
def test_names_that_people_bring_are_understood(text: str, meant: str, tmp_path: Path) -> None:
    assert words(text, tmp_path).endswith(f" Did you mean '{meant}'?")


def test_what_there_is_not_is_said(tmp_path: Path) -> None:
    for name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        told = words(f"{{train: {{{name}: 8}}}}", tmp_path)
        assert told.startswith(f"train.{name}: no such field. There is none: a step's rollouts are split by ")


@each(
    ("option", "meant"),
    [
        ("--lr", "--train.learning_rate"),
        ("--num-generations=4", "--rollout.group_size"),
        ("--train.run_dir", "--run_dir"),
    ],
)
def test_names_on_the_command_line_are_understood(option: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Did you mean '{meant}'?")):
        load_recipe(None, [option] if "=" in option else [option, "1"])


def test_what_foreign_names_lead_to_is_there() -> None:
    listed = {f.path for section in sections() for f in section.fields} | {s.path for s in sections()}
    listed |= {f"{path}.{key}" for path, key in (("credit", "scheme"), ("engine", "name"), ("chat", "renderer"))}
    tops = "|".join({s.path for s in sections() if s.path.isalpha()})
    places = re.compile(rf"\b(?:{tops})\.[a-z_.]*[a-z_]")
    names = foreign_names.tables()
    told = [*names.fields.values(), *names.schemes.values(), *names.values]
    named = {name for sentence in told for name in places.findall(sentence)}
    assert len(named) > 40
    assert named - {"metrics.jsonl"} <= listed


@each("algorithm", foreign_names.tables().schemes)
def test_what_an_algorithm_leads_to_is_a_recipe(algorithm: str) -> None:
    sections: dict[str, Any] = {}
    for told in re.split(" with | and ", foreign_names.tables().schemes[algorithm]):
        path, _, value = told.partition(": ")
        section, _, name = path.partition(".")
        given = yaml.safe_load(value or "true")
        former = sections.get(section, {})
        sections[section] = {**former, name: given} if name else given
    load_recipe(
        {"rollout": {"dynamic_sampling": 4}} if sections.get("rollout") == {"dynamic_sampling": True} else sections
    )


def test_no_field_of_ours_is_taken_for_a_foreign_one() -> None:
    ours = {path.rpartition(".")[2] for path in leaves(Recipe)}
    assert not ours & foreign_names.tables().fields.keys()
    for name, known in foreign_names.tables().values.items():
        taken = re.split(r" \| ", field(name).type) if name != "engine.name" else []
        assert not set(taken) & known.keys(), name
        for value in known.values() if taken else ():
            other, _, of_other = value.partition(": ")
            known_there = field(other).type.split(" | ") if of_other else taken
            assert (of_other or value.partition(",")[0]) in known_there, f"{name}: {value}"
