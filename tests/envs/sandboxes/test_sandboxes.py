"""What holds for every sandbox: files, output, limits, and nothing left behind."""

import copy
import os
import pickle
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from agentrl import ConfigError, EnvironmentFailure, Sandbox, SandboxConfig, UserError
from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import BubblewrapConfig
from agentrl_envs.sandboxes.files import packed, plain_path, unpacked
from agentrl_envs.sandboxes.monty import MontyConfig
from agentrl_envs.sandboxes.unsafe import UnsafeConfig, limit
from tests.support.containers import container
from tests.support.each import each

pytestmark = pytest.mark.process

WHY_NOT = bubblewrap._problem(BubblewrapConfig())
needs_bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=f"bubblewrap: {WHY_NOT}")
CONFIGS = [
    pytest.param(MontyConfig, id="monty"),
    pytest.param(BubblewrapConfig, id="bubblewrap", marks=needs_bubblewrap),
    pytest.param(UnsafeConfig, id="unsafe"),
    pytest.param(container, id="container"),
]
Config: TypeAlias = Callable[..., SandboxConfig]


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Config:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def sandbox(config: Config) -> Iterator[Sandbox]:
    with config(timeout_s=30).build() as sandbox:
        yield sandbox


def test_code_is_run_and_its_output_returned(sandbox: Sandbox) -> None:
    result = sandbox.exec("print(6 * 7)")
    assert (result.output, result.returncode, result.timed_out, result.num_cut) == ("42\n", 0, False, 0)


def test_what_code_raises_is_in_its_output(sandbox: Sandbox) -> None:
    result = sandbox.exec("print('before')\n1 / 0")
    assert result.returncode != 0
    assert result.output.startswith("before\n")
    assert "ZeroDivisionError" in result.output


def test_code_that_is_none_is_an_error_of_the_code(sandbox: Sandbox) -> None:
    result = sandbox.exec("def (")
    assert result.returncode != 0
    assert "SyntaxError" in result.output


def test_files_go_in_and_come_out(sandbox: Sandbox) -> None:
    sandbox.write("data/a.txt", "née\n")
    sandbox.write("data/b.bin", b"\x00\xff")
    code = (
        "import os\nprint(open('data/a.txt').read().upper(), len(open('data/b.bin', 'rb').read()))\nos.mkdir('empty')\n"
    )
    assert sandbox.exec(f"{code}open('out.txt', 'w').write('done')").output == "NÉE\n 2\n"
    assert sandbox.paths() == ["data/a.txt", "data/b.bin", "empty/", "out.txt"]
    assert (sandbox.read("out.txt"), sandbox.read("./data//b.bin")) == (b"done", b"\x00\xff")
    assert sandbox.exec("import os\nopen('empty/x', 'w').write('1')\nos.remove('out.txt')").returncode == 0
    assert sandbox.paths() == ["data/a.txt", "data/b.bin", "empty/x"]


def test_a_file_that_is_not_there_and_a_path_that_leads_out_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError, match="no file 'nothing'"):
        sandbox.read("nothing")
    for path in ("/etc/passwd", "../x", "a/../../x", "", ".", "a\0b"):
        with pytest.raises(ValueError, match="within the sandbox's folder"):
            sandbox.read(path)
        with pytest.raises(ValueError, match="within the sandbox's folder"):
            sandbox.write(path, "x")


def test_sandboxes_know_nothing_of_each_other(config: Config) -> None:
    with config().build() as first, config().build() as second:
        first.write("a", "1")
        first.exec("open('b', 'w').write('2')")
        assert second.paths() == []
        assert "0" in second.exec("import os\nprint(len(os.listdir('.')))").output


def test_output_is_cut_and_counted(config: Config) -> None:
    with config(max_output_bytes=1000, timeout_s=30).build() as sandbox:
        result = sandbox.exec("for _ in range(2000): print('x' * 999)")
        assert (result.output, result.returncode) == (("x" * 999 + "\n")[:1000], 0)
        assert result.num_cut == 1999 * 1000


def test_an_endless_program_ends_at_its_deadline_and_leaves_the_files_as_before(config: Config) -> None:
    with config(timeout_s=1).build() as sandbox:
        sandbox.write("a", "1")
        begun = time.monotonic()
        result = sandbox.exec("open('a', 'w').write('2')\nwhile True: pass")
        assert time.monotonic() - begun < 20
        assert (result.timed_out, result.returncode == 0, sandbox.read("a")) == (True, False, b"1")
        assert sandbox.exec("print(1)").output == "1\n"


def test_memory_is_limited(config: Config) -> None:
    with config(max_memory_mb=100, timeout_s=20).build() as sandbox:
        result = sandbox.exec("x = []\nfor _ in range(100): x.append(b'x' * 10_000_000)\nprint('kept it')")
        assert "kept it" not in result.output.replace("print('kept it')", "")
        assert result.returncode != 0


def test_more_files_than_fit_are_refused(config: Config) -> None:
    with config(max_files_mb=1, timeout_s=20).build() as sandbox:
        sandbox.write("a", b"1" * 600_000)
        with pytest.raises(ValueError, match="would take 1,200,000 bytes; the sandbox holds 1,000,000"):
            sandbox.write("b", b"1" * 600_000)
        sandbox.exec("for n in range(5): open(str(n), 'wb').write(b'1' * 600_000)")
        assert sum(len(sandbox.read(path)) for path in sandbox.paths()) <= 1_000_000
        assert sandbox.read("a") == b"1" * 600_000


def test_it_is_closed_once_and_for_all(sandbox: Sandbox) -> None:
    sandbox.close()
    sandbox.close()
    for use in (lambda: sandbox.exec("1"), lambda: sandbox.read("a"), lambda: sandbox.write("a", "1"), sandbox.paths):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_copy_is_another_sandbox_with_the_same_files(sandbox: Sandbox) -> None:
    sandbox.write("a", "1")
    for other in (copy.deepcopy(sandbox), pickle.loads(pickle.dumps(sandbox))):
        other.exec("open('a', 'w').write('2')")
        assert (sandbox.read("a"), other.read("a")) == (b"1", b"2")


def test_many_threads_run_code_at_once(sandbox: Sandbox) -> None:
    outputs: dict[int, str] = {}

    def run(n: int) -> None:
        outputs[n] = copy.deepcopy(sandbox).exec(f"print({n})").output

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {n: f"{n}\n" for n in range(8)}


def test_a_language_that_it_lacks_is_refused() -> None:
    with MontyConfig().build() as sandbox, pytest.raises(UserError, match=r"'monty' does not run sh; .*'bubblewrap'"):
        sandbox.exec("ls", language="sh")


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_a_shell_runs_among_the_files(config: Config) -> None:
    with config().build() as sandbox:
        sandbox.write("a.txt", "3\n1\n2\n")
        assert sandbox.exec("sort a.txt | head -1; mkdir d; mv a.txt d", language="sh").output == "1\n"
        assert sandbox.exec("exit 3", language="sh").returncode == 3
        assert sandbox.paths() == ["d/a.txt"]


def test_nothing_is_left_behind(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end well, that fail, that are killed and that leave processes behind: nothing of them stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    codes = ["print(1)", "1 / 0", "while True: pass", "import os\nos.abort()"]
    if config is not MontyConfig:
        codes += ["import subprocess\nsubprocess.Popen(['sleep', '600'])"]
    with config(timeout_s=30).build() as sandbox:
        sandbox.exec("1")  # what is made once is there

    def there() -> tuple[int, int, int, int]:
        children = list(psutil.Process().children(recursive=True))
        temporary = os.listdir(tmp_path)
        return len(os.listdir("/proc/self/fd")), len(children), threading.active_count(), len(temporary)

    before = there()
    num_runs = os.environ.get("SANDBOX_RUNS", "10" if config is container else "40")
    for _ in range(int(num_runs) // len(codes)):
        for code in codes:
            is_killed = "while" in code  # on a busy machine perhaps before it has begun
            with (
                suppress(*([EnvironmentFailure] if is_killed else [])),
                config(timeout_s=0.3 if is_killed else 30).build() as sandbox,
            ):
                sandbox.exec(code)
    deadline = time.monotonic() + 10
    while there() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert there() == before


def test_a_sandbox_that_cannot_be_had_is_refused_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap._problem.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    try:
        with pytest.raises(UserError, match=r"bwrap and prlimit .* not installed.*apt-get install bubblewrap.*'monty'"):
            BubblewrapConfig().build()
        with pytest.raises(UserError, match=r"prlimit.*apt-get install util-linux"):
            UnsafeConfig().build()
    finally:
        bubblewrap._problem.cache_clear()


def test_a_bubblewrap_that_may_not_make_namespaces_is_refused_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    bubblewrap._problem.cache_clear()
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name: str(tmp_path / "bwrap") if name == "bwrap" else which(name) or name
    )
    try:
        with pytest.raises(UserError, match="No permissions to create new namespace"):
            BubblewrapConfig().build()
    finally:
        bubblewrap._problem.cache_clear()


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_a_machine_without_files_to_open_is_no_fault_of_the_code(config: Config) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with config(timeout_s=30).build() as sandbox:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(EnvironmentFailure, match=r"^the sandbox .* could not run code: .*Too many open files"):
                sandbox.exec("print(1)")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert sandbox.exec("print(1)").output == "1\n"


@each(
    ("script", "words"),
    [
        (
            "echo 'bwrap: Creating new namespace failed: No space left on device' >&2; exit 1",
            "No space left on device$",
        ),
        ("exit 3", "did not begin and ended with status 3$"),
        ("exec sleep 600", "did not begin within 1 s$"),
    ],
)
def test_a_bubblewrap_that_fails_later_is_no_fault_of_the_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with (
        bubblewrap.Bubblewrap(BubblewrapConfig(timeout_s=1)) as sandbox,
        pytest.raises(EnvironmentFailure, match=words),
    ):
        sandbox.exec("print(1)")


@needs_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.kill(-1, 9)",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nopen(f'/proc/{os.getppid()}/fd/3', 'w').write('bwrap: No space left on device')\nos.kill(-1, 9)",
        "import os\nos._exit(125)",
    ],
)
def test_code_cannot_pass_for_a_bubblewrap_that_failed(code: str) -> None:
    with BubblewrapConfig(timeout_s=30).build() as sandbox:
        assert sandbox.exec(code).returncode != 0
        assert sandbox.exec("print(1)").output == "1\n"


def test_monty_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(UserError, match=r"pip install 'agentrl\[monty\]'"):
        MontyConfig().build()


@each(
    "forged",
    [
        b"",
        b"x" * 511,
        b"x" * 1024,
        packed({"a": b"1"})[:700],
        packed({"a": b"1" * 2000})[:1024] + bytes(512),
        packed({"a": b"1"}).replace(b"00000000001\0", b"77777777777\0"),
        packed({"a": b"1"}).replace(b"00000000001\0", b"-0000000001\0"),
        packed({"../a": b"1"}),
        packed({"/etc/a": b"1"}),
    ],
)
def test_a_forged_archive_is_none(forged: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpacked(forged)


def test_an_archive_comes_back_as_it_went() -> None:
    files = {"a": b"1", "b/": b"", "b/c": bytes(1000), "d/é": b""}
    assert unpacked(packed(files)) == files
    assert plain_path("./b//c") == "b/c"


def test_limits_are_checked() -> None:
    values: dict[str, Any] = {"timeout_s": 0, "max_memory_mb": 1, "max_output_bytes": 0, "max_files_mb": 0}
    for name, value in values.items():
        with pytest.raises(ValueError, match=name):
            MontyConfig(**{name: value})
    with pytest.raises((ValueError, ConfigError)):
        MontyConfig(timeout=1)  # type: ignore[call-arg]


def test_limits_are_no_higher_than_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (5, 7 if which == resource.RLIMIT_CPU else resource.RLIM_INFINITY)
    )
    assert [limit("cpu", 60), limit("cpu", 3), limit("as", 10**9)] == ["--cpu=7", "--cpu=3", "--as=1000000000"]
