import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "plugin_package"


def run_python(*arguments: str, path: Path | None = None, cwd: Path) -> str:
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and install the package as its users would, without a network; the build writes beside its sources."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    run_python("-m", "pip", "install", *options, "--target", str(folder / "site"), str(source), cwd=folder)
    return folder / "site"


@pytest.mark.parametrize("name", ["centered", "centered_credit:Centered"])
def test_a_third_party_scheme_is_found_and_passes_the_conformance_check(installed: Path, name: str) -> None:
    code = f"""
import sys
import agentrl
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group

scheme = agentrl.load_credit({{"scheme": {name!r}, "scale": 2}})
check_credit(scheme)
[credits] = agentrl.assign_credit(scheme, [make_group([[0.0, 1.0], [0.5]])])
print([credit.advantages_T.tolist() for credit in credits], sys.modules["centered_credit"].__file__)
"""
    advantages, _, file = run_python("-c", code, path=installed, cwd=installed.parent).strip().rpartition(" ")
    assert advantages == "[[0.5, 0.5], [-0.5]]"
    assert Path(file).parent == installed


def test_a_third_party_scheme_is_suggested_and_its_options_are_checked(installed: Path) -> None:
    code = """
import agentrl
for spec in ({"scheme": "centred"}, {"scheme": "centered", "scael": 2}):
    try:
        agentrl.load_credit(spec)
    except ValueError as error:
        print(error)
"""
    first, second = run_python("-c", code, path=installed, cwd=installed.parent).splitlines()
    assert first.startswith("credit.scheme: no 'centred' is installed. Did you mean 'centered'?")
    assert second == "credit.scael: 'centered' has no such option. Did you mean 'scale'?"
