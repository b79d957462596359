"""Whatever bytes a file of a run holds, and whatever a command line says: a command ends well, or in one line and status 2."""

import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.data.files import seal
from agentrl.distributed.checkpoints import checkpoint_errors, checkpoints
from agentrl.errors import ConfigError, UserError
from agentrl.learn.policy_state import load_weights
from agentrl.policy.model import load_pretrained
from agentrl.recipe.config import load_recipe, plan
from agentrl.report.folder import RunFolder
from agentrl.rollout import Journal, Tasks
from agentrl.rollout.stream import TaskStream
from agentrl.run import loop
from agentrl.run.build import Parts, build
from agentrl.run.checkpoint import RunState, load_checkpoint, resume
from tests.support.commands import run
from tests.support.each import each
from tests.support.runs import recipe

CALCULATOR = Path(__file__).parents[1] / "examples" / "calculator.yaml"
ODD = [
    b"",
    b"[]",
    b"{}",
    b"null",
    b"0",
    b'"text"',
    b"\xff\xfe",
    b"\x00" * 64,
    b"[" * 3000,
    b'{"a":' * 3000,
    b"[" * 3000 + b"]" * 3000,
    b'{"step": 1e999}\n',
    b'{"step": ' + b"9" * 5000 + b"}\n",
    b"\xef\xbb\xbf{}",
    b"a: &a [*a]\n",
    b"!!python/object/apply:os.system ['touch made']\n",
]


class Stopped(Exception):  # noqa: N818
    """As if the run had been killed."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Parts, RunFolder]]:
    """A run that has checkpoints, records of its rollouts, and a journal of what followed."""
    lasting = {"mode": "partial", "max_live_episodes": 3}
    settings = recipe(
        tmp_path_factory.mktemp("damaged"),
        rollout=lasting,
        train={"steps": 99, "checkpoint_every": 2, "num_minibatches": 1},
    )

    def stop(_phase: str, step: int, *_: object) -> None:
        journal = max(settings.run_dir.glob("journal/*.jsonl"), default=None) if settings.run_dir else None
        if step >= 5 and step % 2 and journal and journal.stat().st_size > 1000:  # some steps leave little under way
            raise Stopped

    with build(settings) as ours:
        with pytest.raises(Stopped):
            loop.train(ours, on_progress=stop)
        assert settings.run_dir is not None
        folder = RunFolder.open(settings.run_dir)
        assert len(checkpoints(folder.checkpoints)) == 2
        yield ours, folder


@st.composite
def damaged(draw: st.DrawFn, content: bytes, others: list[bytes]) -> bytes:
    """A file's content, with something done to it."""
    at = draw(st.integers(0, len(content)))
    part, bit = draw(st.binary(max_size=20)), 1 << draw(st.integers(0, 7))
    return draw(
        st.sampled_from(
            [
                content[:at],
                content[:at] + part + content[at:],
                content[:at] + part + content[at + len(part) :],
                content[:at] + bytes(byte ^ bit for byte in content[at : at + 1]) + content[at + 1 :],
                content[:at] + content[at + 1 + len(part) :],
                content + content[at:],
                part,
                *ODD,
                *others,
            ]
        )
    )


UNTOLD = (".lock", "log.txt")
"""Files of a run that say what commands did, and that no command reads."""


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in UNTOLD}


def outcome(act: Callable[[], object]) -> str | None:
    """What a person is told; None: it went well."""
    try:
        act()
    except UserError as error:
        return str(error)
    return None


def put(path: Path, data: bytes, check: Callable[[], None]) -> None:
    """Put other bytes in the place of a file, and check what comes of it: nothing but that file may have changed."""
    before = contents(path.parent)
    path.write_bytes(data)
    try:
        check()
        after = contents(path.parent)
        assert {**after, path: b""} == {**before, path: b""}
    finally:
        path.write_bytes(before[path])


@pytest.mark.process
@pytest.mark.parametrize(
    "command", [pytest.param("train", marks=pytest.mark.slow), "show", "credit explain", "credit advise"]
)
@given(data=st.data())
def test_a_command_on_a_damaged_file_ends_well_or_in_one_line(
    data: st.DataObject, command: str, interrupted: tuple[Parts, RunFolder]
) -> None:
    folder = interrupted[1]
    metrics, rollouts = folder.path / "metrics.jsonl", folder.rollouts()[0]
    path, arguments = {
        "train": (metrics, ["train", str(folder.path), "--train.steps", "4"]),
        "show": (rollouts, ["show", str(rollouts), "-n", "9"]),
        "credit explain": (rollouts, ["credit", "explain", "gigpo", str(rollouts), "-n", "9"]),
        "credit advise": (rollouts, ["credit", "advise", str(rollouts)]),
    }[command]
    others = [p.read_bytes() for p in (metrics, *folder.rollouts(), *folder.journal.iterdir())]
    content = data.draw(damaged(path.read_bytes(), others))

    def check() -> None:
        status, printed = run(arguments)
        assert status in (0, 2)
        assert not any(code in printed for code in "\x1b\x07\x9b\u202e")
        if status == 2:
            assert printed.startswith("agentrl: ")
            assert printed.count("\n") == 1

    put(path, content, check)


@given(data=st.data())
def test_a_damaged_journal_is_read_to_its_end_or_named_with_its_line(
    data: st.DataObject, interrupted: tuple[Parts, RunFolder], tmp_path_factory: pytest.TempPathFactory
) -> None:
    ours, folder = interrupted
    state = RunState.model_validate_json((checkpoints(folder.checkpoints)[-1] / "agentrl.json").read_bytes())
    (path,) = folder.journal.iterdir()
    assert path.stat().st_size > 1000
    lines = path.read_bytes().splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 1))
    whole = path.read_bytes()
    reordered = [b"".join(lines[:number] + lines[number + 1 :]), b"".join(lines[:number] + lines[number:][::-1])]
    content = data.draw(
        st.one_of(damaged(whole, [p.read_bytes() for p in folder.rollouts()]), st.sampled_from(reordered))
    )
    scratch = tmp_path_factory.mktemp("journal")
    try:
        (scratch / path.name).write_bytes(content)
        stream = TaskStream(ours.recipe.rollout, tasks=Tasks(seed=0), journal=Journal(scratch))
        stream.load_state_dict(state.pool)
        told = outcome(lambda: stream.recover(ignore=False))
        stream.close()
        assert (scratch / path.name).read_bytes() == content
        if told is None and not whole.startswith(content):
            begun = [line for line in content.split(b"\n")[:-1] if line + b"\n" in lines]
            assert len(begun) == content.count(b"\n"), "something else was taken for an event"
        elif told is not None:
            assert told.startswith(f"{scratch / path.name}, line ")
            assert told.endswith(
                f"if {scratch} is deleted, what was sampled since the last checkpoint is sampled again"
            )
    finally:
        shutil.rmtree(scratch)


@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_with_the_one_before_it(
    data: st.DataObject, interrupted: tuple[Parts, RunFolder]
) -> None:
    ours, folder = interrupted
    before, newest = checkpoints(folder.checkpoints)
    path = data.draw(st.sampled_from(sorted(newest.iterdir())))
    others = [p.read_bytes() for p in (*sorted(newest.iterdir()), folder.path / "metrics.jsonl")]
    whole = path.read_bytes()
    content = data.draw(damaged(whole, others))

    def check() -> None:
        told = outcome(lambda: load_checkpoint(ours, newest))
        is_side_file = path.suffix == ".json"
        if content != whole and is_side_file and path.name != "files.json":
            assert told is not None
        if told is not None:
            assert told.startswith(f"the checkpoint {newest} ")
            if is_side_file or len(content) != len(whole):
                assert "is damaged" in told
                assert told.endswith(f"delete it, and the run resumes from {before.name}")

    put(path, content, check)


@each("content", [b"", b"[", b"null", b"{"])
def test_a_damaged_panel_is_refused_before_anything_is_played(
    content: bytes, interrupted: tuple[Parts, RunFolder]
) -> None:
    ours, folder = interrupted

    def check() -> None:
        told = outcome(lambda: resume(ours, folder))
        assert told is not None
        assert told.startswith(str(folder.panel))
        assert "delete it" in told

    put(folder.panel, content, check)


@given(data=st.data())
def test_a_damaged_tokenizer_or_reference_is_named(data: st.DataObject, interrupted: tuple[Parts, RunFolder]) -> None:
    folder = interrupted[1]
    path = data.draw(st.sampled_from(sorted(folder.tokenizer.iterdir())))
    whole = path.read_bytes()
    content = data.draw(damaged(whole, [CALCULATOR.read_bytes()]))

    def check() -> None:
        from agentrl.chat import load_tokenizer

        told = outcome(lambda: load_tokenizer(folder.tokenizer))
        if content != whole and path.name != "files.json":
            assert told is not None
        assert told is None or told.startswith("the tokenizer of this run is damaged")

    put(path, content, check)


@given(data=st.data())
def test_a_recipe_of_any_bytes_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(data.draw(damaged(CALCULATOR.read_bytes(), [])))
    told = outcome(lambda: plan(load_recipe(path)))
    assert told is None or len(told) < 20_000


VALUES = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=12),
    st.sampled_from(
        ["1e20", "-1", "nan", "{", "[" * 3000, '{"a": 1}', "~/x", "9" * 5000, "1e-3", "null", "\x00", "=", "--"]
    ),
)
OPTIONS = st.sampled_from(
    [
        *(
            "--rollout.group_size",
            "--rollout",
            "--train.steps",
            "--train.learning_rate",
            "--env.options.x",
            "--env.options",
        ),
        *(
            "--credit.gamma",
            "--credit.a.b",
            "--credit",
            "--credit.scheme",
            "--run_dir",
            "--seed",
            "--model.lora",
            "--evaluation",
        ),
        *("--evaluation", "--no.such", "--", "-x", "--engine.server.url", "--train.betas", "--env.id", "--engine.vllm"),
    ]
)


@example(words=["9" * 20_000])
@example(words=["9 " * 10_000])
@example(words=["--" + "9" * 20_000])
@given(words=st.lists(st.one_of(OPTIONS, VALUES, st.builds(lambda a, b: f"{a}={b}", OPTIONS, VALUES)), max_size=5))
def test_options_of_any_kind_are_taken_or_refused(words: list[str]) -> None:
    told = outcome(lambda: plan(load_recipe(CALCULATOR, words)))
    assert told is None or len(told) < 20_000


@pytest.mark.slow
@example(words=["--", "turn_return", "--"])
@given(
    words=st.lists(
        st.one_of(VALUES, st.sampled_from(["-n", "--number", "--trajectory", "--gamma", "turn_return"])), max_size=4
    )
)
def test_a_command_line_of_any_words_is_carried_out_or_refused(
    words: list[str], interrupted: tuple[Parts, RunFolder]
) -> None:
    rollouts = str(interrupted[1].rollouts()[0])
    for command in (["show", rollouts], ["credit", "explain", "uniform", rollouts], ["show"], ["credit", "explain"]):
        status, printed = run([*command, *words])
        assert status in (0, 2)
        assert "Traceback" not in printed


def test_the_folder_of_a_run_is_not_changed_by_an_option(
    interrupted: tuple[Parts, RunFolder],
) -> None:
    path = interrupted[1].path
    status, printed = run(["train", str(path), "--run_dir", "elsewhere"])
    told = f"agentrl: --run_dir: the run stays in {path}; leave it out, or copy the folder"
    assert (status, " ".join(printed.split())) == (2, told)


def test_numbers_are_numbers_in_every_place_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("env: {id: key_door, options: {a: 1e-3, b: '1e-3'}}\nrun_dir: ~/runs\n")
    read = load_recipe(path, ["--env.options.c", "1E4"])
    assert read.env.options == {"a": 0.001, "b": "1e-3", "c": 10000.0}
    assert read.run_dir == Path.home() / "runs"
    folder = RunFolder.create(tmp_path / "run", read.model_dump(mode="json"))
    assert load_recipe(folder.config_file).env.options == read.env.options


@each("field", ["rollout.group_size", "rollout.num_groups", "evaluation.num_tasks", "train.steps"])
def test_a_count_beyond_what_a_run_can_hold_is_refused_at_once(field: str) -> None:
    for number in ("1e20", "100000000000"):
        with pytest.raises(ConfigError, match=rf"{field}: .*(got |lower it)"):
            load_recipe(CALCULATOR, [f"--{field}", number])


class Intruder:
    """Whose pickle runs a command."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.made}",)


FORGED = [
    *("custom_checkpoint_0.pkl", "random_states_0.pkl", "optimizer.bin", "scheduler.bin", "pytorch_model.bin"),
    *("optimizer.pt", "values.pt", "model.safetensors", "learner-0.json", "agentrl.json", "shards/.metadata"),
]


@each("name", FORGED)
def test_no_file_of_a_checkpoint_runs_code(name: str, interrupted: tuple[Parts, RunFolder], tmp_path: Path) -> None:
    ours, folder = interrupted
    forged, made = tmp_path / "step-000004", tmp_path / "made"
    shutil.copytree(checkpoints(folder.checkpoints)[-1], forged)
    for form in (pickle.dumps, saved_by_torch):
        (forged / name).parent.mkdir(exist_ok=True)
        (forged / name).write_bytes(form(Intruder(made)))
        (forged / "files.json").unlink()  # whoever forges a file seals it anew
        seal(forged)
        for read in (lambda: load_checkpoint(ours, forged), lambda: load_weights_of(forged, ours)):
            told = outcome(read)
            assert "weights_only" not in str(told)  # torch's words, which advise to read it all the same
        assert not made.exists()
    pickle.loads(pickle.dumps(Intruder(made)))
    assert made.exists()  # so that none of this is true by chance


def load_weights_of(checkpoint: Path, ours: Parts) -> None:
    with checkpoint_errors(checkpoint):
        load_weights(ours.policy, checkpoint)


def saved_by_torch(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_exporting_a_run_runs_nothing_that_its_recipe_names(
    interrupted: tuple[Parts, RunFolder], tmp_path: Path
) -> None:
    folder, made = interrupted[1], tmp_path / "made"
    forged = tmp_path / "run"
    shutil.copytree(folder.path, forged)
    (forged / "shop.py").write_text(f"open({str(made)!r}, 'w')")
    config = folder.config() | {"env": {"id": "os:system", "options": {"command": f"touch {made}"}}}
    RunFolder(forged).write_config(config)
    status, printed = run(["export", str(forged), str(tmp_path / "exported")])
    assert (status, (tmp_path / "exported" / "model.safetensors").is_file()) == (0, True), printed
    status, printed = run(["eval", str(forged)])
    assert status == 2
    assert "'os:system' gives builtin_function_or_method, which is no agentrl.MessageEnv" in " ".join(printed.split())
    assert not made.exists()


def test_modules_are_not_looked_for_in_the_folder_of_a_run(
    interrupted: tuple[Parts, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(interrupted[1].path / "rollouts")
    before = list(sys.path)
    for target in ("..", str(interrupted[1].path)):
        run(["show", target])
        assert sys.path == before
    run(["show", "step-000001.jsonl"])
    assert sys.path == [os.getcwd(), *before]


def test_a_tokenizer_or_model_that_brings_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    (tmp_path / "model").mkdir()
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil") | {"AutoTokenizer": ["evil.Evil", None]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    (tmp_path / "model" / "evil.py").write_text(f"open({str(made)!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="cannot load"):
        load_pretrained(str(tmp_path / "model"))
    assert not made.exists()


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["envs"]) == (2, "agentrl: the working directory is gone; go to one that is there\n")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="Linux has a folder in which nothing can be made")
def test_a_run_folder_that_cannot_be_made_is_told() -> None:
    status, printed = run(["train", str(CALCULATOR), "--run_dir", "/proc/run", "--warmup.steps", "0"])
    assert status == 2
    assert printed.splitlines()[-1].startswith("agentrl: cannot ")
