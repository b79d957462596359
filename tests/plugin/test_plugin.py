"""A package of somebody else's, installed into a fresh environment, plugs into every seam that is open to one."""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.report.records import read_records
from tests.support.tiers import first_quick

pytestmark = pytest.mark.process

HERE = Path(__file__).parent


def run(*command: str | Path, cwd: Path) -> str:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what this one has, and the package, installed as its users would.

    Nothing comes from a network, and the build writes beside a copy of the sources.
    """
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(HERE / "package", folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    inherited = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (own / "inherited.pth").write_text("\n".join(inherited))
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, source, cwd=folder)
    return python


@pytest.mark.parametrize("name", first_quick(["centered", "stranger.centered:Centered"]))
def test_a_third_party_scheme_is_found_and_passes_the_conformance_check(
    name: str, python: Path, tmp_path: Path
) -> None:
    code = f"""
import sys
import agentrl
from agentrl.testing import check_credit, make_group

scheme = agentrl.load_credit({{"scheme": {name!r}, "scale": 2}})
check_credit(scheme)
[credits] = agentrl.assign_credit(scheme, [make_group([[0.0, 1.0], [0.5]])])
print([credit.advantages_T.tolist() for credit in credits], sys.modules["stranger.centered"].__file__)
"""
    advantages, _, file = run(python, "-c", code, cwd=tmp_path).strip().rpartition(" ")
    assert advantages == "[[0.5, 0.5], [-0.5]]"
    assert python.parents[1] in Path(file).parents


def test_a_third_party_scheme_is_suggested_and_its_options_are_checked(python: Path, tmp_path: Path) -> None:
    code = """
import agentrl
for spec in ({"scheme": "centred"}, {"scheme": "centered", "scael": 2}):
    try:
        agentrl.load_credit(spec)
    except ValueError as error:
        print(error)
"""
    first, second = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert first.startswith("credit.scheme: no 'centred' is installed. Did you mean 'centered'?")
    assert second == "credit.scael: 'centered' has no such option. Did you mean 'scale'?"


@pytest.mark.slow
def test_a_third_party_environment_and_renderer_pass_the_conformance_checks(python: Path, tmp_path: Path) -> None:
    code = """
from agentrl.chat import RendererConfig, train_tokenizer
from agentrl.testing import check_env, check_renderer

check_env("doors", num_doors=4)
check_renderer(RendererConfig.model_validate({"renderer": "preface"}).build(train_tokenizer([], vocab_size=261)))
"""
    run(python, "-c", code, cwd=tmp_path)


@pytest.mark.slow
def test_a_third_party_engine_passes_the_conformance_check(python: Path, tmp_path: Path) -> None:
    code = """
import asyncio
import copy
import torch
from agentrl.chat import train_tokenizer
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.testing import check_engine
from stranger.plain import PlainEngine

torch.manual_seed(0)
tokenizer = train_tokenizer([], vocab_size=261)
config = LocalModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, initializer_std=0.3)
first, second = (make_local_model(config, tokenizer) for _ in range(2))
weights = tuple({name: tensor.clone() for name, tensor in m.state_dict().items()} for m in (first, second))
reference_model = copy.deepcopy(first).eval()

@torch.no_grad()
def reference(prompt, tokens, temperature):
    logits = reference_model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

asyncio.run(check_engine(PlainEngine(first, 0.0), reference, vocab_size=261, weights=weights))
"""
    run(python, "-c", code, cwd=tmp_path)


@pytest.mark.slow
def test_a_recipe_of_third_party_parts_trains_a_step(python: Path, tmp_path: Path) -> None:
    run(python, "-m", "agentrl", "train", HERE / "recipe.yaml", "--run_dir", tmp_path / "run", cwd=tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1]
    found = list(read_records(tmp_path / "run" / "rollouts" / "step-000001.jsonl"))
    assert len(found) == 4
    for record in found:
        assert record.env_id == "Doors"
        first = record.turns[0]
        mean = sum(other.reward for other in found if other.group_id == record.group_id) / 2
        assert first.advantages == pytest.approx([2 * (record.reward - mean)] * len(first.action_ids))
