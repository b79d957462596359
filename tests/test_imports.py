import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

import agentrl
from tests.support.each import each
from tests.support.packages import PACKAGES

HEAVY = ("gymnasium", "torch", "transformers", "accelerate", "vllm", "agentrl_envs", "agentrl_credit")


def loaded_by(script: str, modules: Sequence[str] = HEAVY) -> set[str]:
    """Return which of the modules a fresh process has loaded after a script."""
    report = f"import sys; print(*(name for name in {modules!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\n{report}"], capture_output=True, text=True, timeout=300, check=True
    )
    return set(done.stdout.split())


PLUG_INS = sorted(
    path
    for package, pattern in (("agentrl_envs", "*.py"), ("agentrl_envs", "sandboxes/*.py"), ("agentrl_credit", "*.py"))
    for path in PACKAGES[package].glob(pattern)
)


def test_importing_agentrl_loads_neither_torch_nor_a_plug_in() -> None:
    assert loaded_by("import agentrl") == set()


@each(("said", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")])
def test_threads_spin_shortly_while_they_wait_unless_somebody_has_said_otherwise(
    said: dict[str, str], spins: str
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    code = "import agentrl.cli, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment | said, check=True, capture_output=True, text=True
    )
    assert shown.stdout.strip() == spins


def test_importing_names_that_everybody_uses_loads_neither() -> None:
    assert loaded_by("from agentrl import Message, Trajectory, UserError") == set()


def test_what_authors_of_environments_and_schemes_use_loads_neither() -> None:
    training = {"TrainedRun", "evaluate", "play", "train"}
    names = ", ".join(sorted(set(agentrl.__all__) - training))
    assert loaded_by(f"from agentrl import {names}") == {"gymnasium"}  # the base of MessageEnv
    assert loaded_by(
        "from agentrl.env import make_env; from agentrl.recipe.registry import names; names('agentrl.envs')"
    ) == {"gymnasium"}


def test_checking_a_scheme_loads_no_torch() -> None:
    script = "from agentrl.testing import check_credit; check_credit('turn_gae', relative=False)"
    assert "torch" not in loaded_by(script)


@pytest.mark.slow
@pytest.mark.process
def test_reading_a_recipe_loads_no_machinery_of_models() -> None:
    script = "from agentrl.recipe.config import load_recipe; load_recipe(None, [])"
    machinery = ("torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils")
    assert loaded_by(script, machinery) == set()


def test_a_plug_in_loads_nothing_heavy() -> None:
    assert loaded_by("from agentrl.env import make_env; make_env('key_door')") == {"gymnasium", "agentrl_envs"}


def private_imports(body: ast.Module) -> Iterator[str]:
    """Yield the imports of a plug-in that are not of `agentrl`'s public names or of `agentrl.testing`."""
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            if any(alias.name.startswith("agentrl.") for alias in node.names):
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "agentrl":
            is_public = {alias.name for alias in node.names} <= set(agentrl.__all__)
            if not (node.module == "agentrl.testing" or (node.module == "agentrl" and is_public)):
                yield ast.unparse(node)


def test_built_in_plug_ins_use_public_names_only() -> None:
    bodies = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PLUG_INS}
    assert [f"{path}: {line}" for path, body in bodies.items() for line in private_imports(body)] == []


def test_a_private_import_of_a_plug_in_is_found() -> None:
    lines = [
        "import agentrl.types",
        "from agentrl.types import Turn",
        "from agentrl import Message, errors",
        "import agentrl",
        "from agentrl import Message, Turn",
        "from agentrl.testing import make_group",
        "from agentrl_envs import key_door",
    ]
    assert list(private_imports(ast.parse("\n".join(lines)))) == lines[:3]


def test_there_are_built_in_plug_ins() -> None:
    assert {"key_door", "turn_return"} <= {path.stem for path in PLUG_INS}


def test_a_public_name_is_the_one_of_its_home() -> None:
    for name in agentrl.__all__:
        found = getattr(agentrl, name)
        assert found is getattr(sys.modules[agentrl._HOME[name]], name), name
        assert name in dir(agentrl)
    assert not {"importlib", "os", "Any"} & set(dir(agentrl))


def test_all_lists_every_public_name_once() -> None:
    assert sorted(agentrl.__all__) == sorted(agentrl._HOME)
    assert len(set(agentrl.__all__)) == len(agentrl.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'agentrl' has no attribute 'Trayectory'"):
        _ = agentrl.Trayectory
