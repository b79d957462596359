import pytest

from agentrl.errors import ConfigError
from agentrl.registry import Group, names, resolve, suggest


def message(spec: str, *, group: Group = "agentrl.envs", field: str = "env.id") -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(spec, group=group, field=field)
    return str(caught.value)


def test_the_built_ins_are_installed_by_name() -> None:
    assert {"calculator", "key_door", "service_desk"} <= set(names("agentrl.envs"))
    assert {"uniform", "turn_return"} <= set(names("agentrl.credit"))
    for group in ("agentrl.envs", "agentrl.credit"):
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


def test_a_suggestion_is_the_nearest_name_or_all_of_them() -> None:
    assert suggest("gama", ["lone", "gamma", "eps"]) == " Did you mean 'gamma'?"
    assert suggest("zzz", ["lone", "gamma", "eps"]) == " Known: eps, gamma, lone."
    assert suggest("zzz", []) == " Known: none."
