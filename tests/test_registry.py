import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.recipe import registry
from agentrl.recipe.registry import Group, names, resolve, suggest
from tests.support.each import each


def message(spec: str, *, group: Group = "agentrl.envs", field: str = "env.id") -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(spec, group=group, field=field)
    return str(caught.value)


def test_the_built_ins_are_installed_by_name() -> None:
    assert {"calculator", "key_door", "service_desk"} <= set(names("agentrl.envs"))
    assert {"uniform", "turn_return"} <= set(names("agentrl.credit"))
    assert {"auto", "chatml", "template"} <= set(names("agentrl.renderers"))
    assert names("agentrl.wrappers") == ["limit_observation", "record", "time_limit"]
    for group in ("agentrl.envs", "agentrl.credit", "agentrl.renderers"):
        listed = names(group)
        assert listed == sorted(set(listed))


def test_a_name_and_its_module_and_attribute_give_the_same_class() -> None:
    by_name = resolve("key_door", group="agentrl.envs", field="env.id")
    assert by_name is resolve("agentrl_envs.key_door:KeyDoor", group="agentrl.envs", field="env.id")
    assert by_name.__name__ == "KeyDoor"


def test_a_name_belongs_to_its_group() -> None:
    assert message("uniform", group="agentrl.envs").startswith("env.id: no 'uniform' is installed.")


def test_a_name_that_is_not_installed_is_told_with_the_nearest() -> None:
    assert message("key_dor") == (
        "env.id: no 'key_dor' is installed. Did you mean 'key_door'? Or give it as 'module:Class'."
    )
    known = ", ".join(names("agentrl.credit"))
    assert message("zzz", group="agentrl.credit", field="credit.scheme") == (
        f"credit.scheme: no 'zzz' is installed. Known: {known}. Or give it as 'module:Class'."
    )


def test_a_module_or_an_attribute_that_is_not_there_is_named() -> None:
    assert message("my_shop:Shop") == (
        "env.id: cannot import 'my_shop' of 'my_shop:Shop' (No module named 'my_shop'). "
        "Run from the folder that holds it, or install it."
    )
    assert message("agentrl_envs.key_door:KeyDor") == (
        "env.id: module 'agentrl_envs.key_door' has no 'KeyDor'. Did you mean 'KeyDoor'?"
    )


@each(
    ("text", "words"),
    [
        ("class E(:", "SyntaxError: invalid syntax (broken_shop.py, line 1)"),
        ("raise RuntimeError('the till is locked')", "RuntimeError: the till is locked"),
        ("import json; json.lods", "AttributeError: module 'json' has no attribute 'lods'"),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        (
            "from agentrl import ToolEnv, tool\nclass E(ToolEnv):\n    @tool\n    def f(self, *a) -> str: return ''",
            "TypeError: tool E.f: parameter *a has no name a model could give",
        ),
    ],
)
def test_what_a_module_raises_while_it_is_imported_is_passed_on(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_shop.py").write_text(text)
    said = message("broken_shop:E")
    assert said.startswith(f"env.id: importing 'broken_shop' of 'broken_shop:E' raised {words}")
    assert "broken_shop" not in sys.modules


def test_a_module_that_exits_while_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "closed_shop.py").write_text("import sys; sys.exit(3)")
    assert message("closed_shop:E") == "env.id: importing 'closed_shop' of 'closed_shop:E' ended in sys.exit(3)"


@each("value", ["json:no_such_class", "no_such_module:E"])
def test_an_installed_plug_in_that_cannot_be_loaded_is_named_with_the_reason(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint(name="stale", value=value, group="agentrl.credit")
    monkeypatch.setattr(registry, "_points", lambda group: {"stale": point})
    reason = (
        "AttributeError: module 'json' has no attribute 'no_such_class'"
        if value.startswith("json")
        else "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert message("stale", group="agentrl.credit", field="credit.scheme") == (
        f"credit.scheme: the installed 'stale' ({value}) could not be loaded: {reason}"
    )


def test_both_parts_of_module_and_attribute_are_needed() -> None:
    assert message(":E") == "env.id: ':E' lacks its module; write 'module:Class'"
    assert message("json:") == "env.id: 'json:' lacks its attribute; write 'module:Class'"
    assert message(":") == "env.id: ':' lacks its module; write 'module:Class'"


def test_a_suggestion_is_the_nearest_name_or_all_of_them() -> None:
    assert suggest("gama", ["lone", "gamma", "eps"]) == " Did you mean 'gamma'?"
    assert suggest("zzz", ["lone", "gamma", "eps"]) == " Known: eps, gamma, lone."
    assert suggest("zzz", []) == " Known: none."


def test_words_of_several_lines_are_told_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loud_shop.py").write_text(r"raise ValueError('one\ntwo\n\x1b[31mthree')")
    words = r"importing 'loud_shop' of 'loud_shop:E' raised ValueError: one two \x1b[31mthree"
    assert message("loud_shop:E") == f"env.id: {words}"
