"""Containers of podman and of docker, for real: what they hold, and that nothing of them stays.

What holds for every sandbox is in test_sandboxes.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl import ConfigError, SandboxConfig, UserError
from agentrl.env import ask_oracle, make_env
from agentrl.env.message_env import base_env
from agentrl_envs.data import read_yaml
from agentrl_envs.sandboxes import container as module
from agentrl_envs.sandboxes.container import Container, ContainerConfig
from tests.envs.sandboxes import test_escapes
from tests.support.containers import container
from tests.support.each import each

pytestmark = pytest.mark.process

ITS_OWN = {
    "read the users of the host": "the file is the image's",
    "read through the root of the first process": "the folders are the image's",
    "write to /dev/shm": "its memory is the container's",
    "read the kernel's tree": "read-only, as /proc is",
    "kill the first process": "the kernel ignores it",
    "find a mount that honours set-user-ID": "no new privileges",
    "use calls of another table": "the program is killed",
    "raise its own limits": "those of the container hold",
}
"""Attempts that get something which is no way out."""

host = test_escapes.host


def containers(program: str, pid: int) -> list[str]:
    """Return the containers of a process."""
    command = [program, "ps", "--all", "--format", "{{.Names}}"]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return [name for name in names if name.startswith(f"agentrl-{pid}-")]


def sleepers(seconds: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.parametrize("program", ["podman", "docker"])
def test_commands_run_among_the_files_and_are_killed_as_a_tree(program: str) -> None:
    seconds = f"6{os.getpid()}"
    with container(program=program, timeout_s=2).build() as sandbox:
        long = f"{'d' * 90}/{'n' * 90}"
        sandbox.write("a.txt", "3\n1\n2\n")
        code = f"sort a.txt | head -n 1; id -u; mkdir {'d' * 90}; mv a.txt {long}; setsid sleep {seconds} & exit 3"
        result = sandbox.exec(code, language="sh")
        assert (result.output, result.returncode, result.timed_out) == ("1\n65534\n", 3, False)
        assert (sandbox.paths(), sandbox.read(long)) == ([long], b"3\n1\n2\n")
        result = sandbox.exec(f"rm -r *; echo begun; setsid sleep {seconds} & sleep {seconds}", language="sh")
        assert (result.output, result.timed_out, sandbox.paths()) == ("begun\n", True, [long])
    assert sleepers(seconds) == []
    assert containers(program, os.getpid()) == []


MANY = """
import subprocess
children = []
try:
    for n in range(100):
        children.append(subprocess.Popen(['sleep', '9']))
except OSError:
    print(len(children))
"""
HOLD = "x = bytearray(30_000_000); import time; time.sleep(3)"
HOLD_TOGETHER = f"""
import subprocess, sys
for child in [subprocess.Popen([sys.executable, '-c', {HOLD!r}]) for _ in range(8)]:
    print(child.wait())
"""
SPIN = """
import os, time
os.fork(), os.fork()
begin = time.time()
while time.time() < begin + 3:
    pass
os.write(1, f'{time.process_time()} '.encode())
time.sleep(2)
"""


@pytest.mark.slow
def test_limits_hold_for_all_processes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with container(max_processes=20, max_memory_mb=120, timeout_s=30).build() as sandbox:
        assert int(sandbox.exec(MANY).output) == 20 - 2 - 1  # but for the sandbox's two and the program
        ends = sandbox.exec(HOLD_TOGETHER).output.split()
        assert "-9" in ends or len(ends) < 8  # eight times 30 MB are more than 120 MB
    assert not list(tmp_path.iterdir())  # podman writes that memory was used up where it was started
    with container(cpus=0.5, timeout_s=30).build() as sandbox:
        assert sum(map(float, sandbox.exec(SPIN).output.split())) < 0.5 * 3 + 1  # four processes, for 3 s


@pytest.mark.slow
def test_it_knows_nothing_of_the_host_and_changes_nothing(host: dict[str, Any]) -> None:
    with container(timeout_s=20).build() as sandbox:
        for name in test_escapes.OTHER_WAY:
            test_escapes.assert_held(test_escapes.tried(sandbox, test_escapes.ATTEMPTS[name], **host))  # type: ignore[arg-type]


@pytest.mark.slow
@each("name", test_escapes.ATTEMPTS)
def test_no_attempt_gets_out(name: str, host: dict[str, Any]) -> None:
    with container(timeout_s=20).build() as sandbox:
        result = test_escapes.tried(sandbox, test_escapes.ATTEMPTS[name], **host)  # type: ignore[arg-type]
        if name in ITS_OWN:
            assert ("ESCAPED" in result.output) != (name == "use calls of another table")
        else:
            test_escapes.assert_held(result)


@pytest.mark.slow
def test_a_container_ends_though_who_waits_for_it_was_killed() -> None:
    config = container(timeout_s=2)
    seconds = f"7{os.getpid()}"
    script = (
        "from agentrl_envs.sandboxes.container import ContainerConfig\n"
        f"ContainerConfig(**{config.model_dump()!r}).build().exec('killall -9 timeout; sleep {seconds}', language='sh')"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while not sleepers(seconds) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sleepers(seconds)
    assert containers(config.program or "podman", process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    program = config.program or "podman"
    while (sleepers(seconds) or containers(program, process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (sleepers(seconds), containers(program, process.pid)) == ([], [])


@pytest.mark.slow
@each(
    ("name", "options"),
    [
        ("shell", {"num_jobs": 4, "kinds": ["edit", "sort_lines", "sum_column", "move"]}),
        ("python_sandbox", {}),
        ("repository", {"only": ["expired_goods", "median"]}),
    ],
)
def test_environments_use_it_by_one_option(name: str, options: dict[str, Any]) -> None:
    config = container(timeout_s=20)
    sandbox = {"name": "container", "image": config.image, "program": config.program, "runtime": config.runtime}
    env = base_env(make_env(name, {**options, "sandbox": {**sandbox, "timeout_s": 20}}))
    env.reset(seed=0, options={"split": "train"})
    is_over = False
    info: dict[str, Any] = {}
    while not is_over:
        _, _, is_over, _, info = env.step(ask_oracle(env))
    assert info["success"] is True
    env.close()


def test_python_is_refused_where_the_image_has_none() -> None:
    sandbox = Container(container(), languages=("sh",))
    with pytest.raises(UserError, match="'container' does not run python"):
        sandbox.exec("print(1)")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = container()
    with pytest.raises(
        ConfigError, match=r"'container' is not available here: .*no-such-image.*podman pull localhost/no-such-image"
    ):
        ContainerConfig(image="localhost/no-such-image", program=found.program, runtime=found.runtime).build()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    module._look.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"neither podman nor docker is installed.*apt-get install podman"):
            ContainerConfig().build()
    finally:
        module._look.cache_clear()


def test_limits_that_do_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where podman runs without root and the machine's control groups are those of version 1: it ignores limits."""
    made = module._run_options

    def without_limits(config: ContainerConfig, name: str) -> list[str]:
        options = made(config, name)
        at = options.index("--pids-limit")
        return [*options[:at], "--pids-limit", "0", *options[at + 2 :]]

    config = container(max_processes=50)
    monkeypatch.setattr(module, "_run_options", without_limits)
    module._look.cache_clear()
    with pytest.raises(ConfigError, match="limit of processes"):
        config.build()
    module._look.cache_clear()


def test_the_filter_refuses_what_bubblewraps_does() -> None:
    profile = json.loads(Path(module._SECCOMP).read_text(encoding="utf-8"))
    always = {name for rule in profile["syscalls"] if "args" not in rule for name in rule["names"]}
    assert always == {*read_yaml("refused_calls.yaml"), "clone3"}
    flags = [rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["clone"]]
    assert sum(flags) == 0x7E020000 | 0x80
    sockets = [rule["args"][0] for rule in profile["syscalls"] if rule["names"] == ["socket", "socketpair"]]
    equal = {arg["value"] for arg in sockets if arg["op"] == "SCMP_CMP_EQ"}
    above = [arg["value"] for arg in sockets if arg["op"] == "SCMP_CMP_GT"]
    assert (equal | {1, 2, 10}, above) == (set(range(11)), [10])


def test_fields_are_checked() -> None:
    for fields in ({"program": "lxc"}, {"cpus": 0}, {"max_processes": 2}, {"image": "--privileged"}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            SandboxConfig.named("container").model_validate(fields)
