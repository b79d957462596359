"""Containers of podman or docker: each `exec` is one of its own, from an image that all share, and gone with it."""

import itertools
import os
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl import ConfigError, EnvironmentFailure, ExecResult, Language, SandboxConfig
from agentrl_envs.sandboxes.bubblewrap import BEGUN, archive_of, failure, outcome
from agentrl_envs.sandboxes.files import Files, FileSandbox
from agentrl_envs.sandboxes.unsafe import START_S, Finished, allowed, run_process

_SECCOMP = Path(__file__).parents[1] / "data" / "seccomp.json"
"""Filter of system calls, bubblewrap's in another form: the programs' own let sockets of the hypervisor and namespaces pass."""
_RUNS = itertools.count()
_USER = "65534:65534"
_OPEN_FILES = 1024
_USER_PROCESSES = 10_000
"""Processes of all containers together, which run as one user; each has `max_processes`."""
_ENVIRONMENT = {"HOME": "/work", "PYTHONPATH": "/work", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}

# As the script of bubblewrap, for any image with a shell, tar and timeout, busybox's too. Its first argument is a deadline some
# seconds past the one that this process holds it to: so it ends if this process has been killed. podman's own `--timeout`
# ends it also where code has killed `timeout`.
_SCRIPT = f"""
echo '{BEGUN.decode().strip()}' >&2
exec 3>&2 2>&1
tar -xmf - -C / && cd /work || exit 125
timeout -s KILL "$@" </dev/null 3>&-
status=$?
kill -s KILL -- -1 2>/dev/null
tar -cf - -C /work . >&3 2>/dev/null
exit $status
"""


# A kernel of its own, as gVisor's, shows no limits.
_FIRST = """
echo well
limits=$(cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max 2>/dev/null)
echo $limits
command -v python3
"""


class ContainerConfig(SandboxConfig):
    """A container without network and rights, on a read-only image, killed as a tree at its limits.

    The image needs `sh`, `tar` and `timeout`, as nearly all have, and `python3` to run Python. Prefer podman without root: a
    way out of the container then leads to a user without rights.
    """

    name: Literal["container"] = "container"
    image: Annotated[str, Field(pattern=r"^\w[\w./:@-]*$")] = "docker.io/library/python:3.12-slim"
    """Image that all episodes share. It is never pulled here: pull, build or import it before."""
    program: Literal["podman", "docker"] | None = None
    """Program that runs it. None: podman if it is installed, else docker."""
    runtime: str | None = None
    """OCI runtime, such as `runc`, or `runsc` (gVisor) for a kernel of its own. None: the program's."""
    network: str = "none"
    """Network of the program to join. `none`: there is no way out."""
    max_processes: Annotated[int, Field(ge=8, le=100_000)] = 64
    """Processes and threads at the same time, two of which are the sandbox's own. All together have `max_memory_mb`, in which
    their files count."""
    cpus: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Processor time of all processes together, in cores."""

    def build(self) -> "Container":
        """Return a new sandbox.

        Raises:
            ConfigError: if the program or the image is missing, or containers cannot run here.
        """
        kept = self.model_dump(include={"image", "program", "runtime", "network", "max_processes"})
        found = _look(ContainerConfig(**kept, timeout_s=60.0, max_output_bytes=1000))
        if isinstance(found, str):
            raise ConfigError(
                f"sandbox: 'container' is not available here: {found}. It needs podman (apt-get install podman), or docker and "
                f"its service, and the image: {self.program or 'podman'} pull {self.image}"
            )
        return Container(self, languages=found)


class Container(FileSandbox):
    """Each `exec` is a container, with the files in memory."""

    def __init__(self, config: ContainerConfig, *, languages: tuple[Language, ...]) -> None:
        super().__init__(config)
        self.config, self.languages = config, languages

    def _run(self, code: str, language: Language, files: Files) -> tuple[ExecResult, Files | None]:
        command = ["python3", "-s", "/tmp/main"] if language == "python" else ["sh", "/tmp/main"]
        try:
            done = _finished(self.config, command, archive_of(code, files))
        except OSError as error:
            raise failure(self.name, f"{type(error).__name__}: {error}") from error
        return outcome(self.name, done, timeout_s=START_S)


def _finished(config: ContainerConfig, command: list[str], archive: bytes) -> Finished:
    """Run a command in a new container, and remove that."""
    name = f"agentrl-{os.getpid()}-{next(_RUNS)}-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:  # podman leaves a file `oom` where it was started
        done = _run_client(config, name, command, archive, folder)
    if done.timed_out or done.is_cut:  # the client was killed, and the container was not
        run_process(
            [*_client(config), "rm", "--force", *(["--time", "0"] if _program(config) == "podman" else []), name],
            timeout_s=START_S,
            max_output=0,
            max_second=1000,
            environment=os.environ,
        )
    return done


def _run_client(config: ContainerConfig, name: str, command: list[str], archive: bytes, folder: str) -> Finished:
    """Run the client to its end, or to the deadline, in a folder of its own."""
    return run_process(
        [*_client(config), *_run_options(config, name), config.image, "-c", _SCRIPT, "sh", _late(config), *command],
        stdin=archive,
        timeout_s=config.timeout_s,
        max_output=config.max_output_bytes,
        max_second=2 * config.max_files_mb * 1_000_000 + 1_000_000,
        environment=os.environ,  # of the client alone
        begins_with=BEGUN,
        cwd=folder,
    )


def _late(config: ContainerConfig) -> str:
    """Return the seconds after which a container ends though nobody waits for it."""
    return f"{int(config.timeout_s) + 5}"


def _program(config: ContainerConfig) -> str:
    return config.program or ("podman" if shutil.which("podman") else "docker")


def _client(config: ContainerConfig) -> list[str]:
    """Return the program, with the options that stand before its command."""
    if _program(config) == "docker":
        return ["docker"]
    return ["podman", "--log-level", "error", *(["--runtime", config.runtime] if config.runtime else [])]


def _run_options(config: ContainerConfig, name: str) -> list[str]:
    folder = f"rw,exec,nosuid,nodev,mode=1777,size={config.max_files_mb * 1_000_000}"
    options = ["run", "--name", name, "--rm", "--interactive", "--pull", "never", "--log-driver", "none"]
    options += ["--network", config.network, "--hostname", "sandbox", "--no-healthcheck"]
    options += ["--user", _USER, "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    options += ["--security-opt", f"seccomp={_SECCOMP}"]
    options += ["--read-only", "--tmpfs", f"/work:{folder}", "--tmpfs", f"/tmp:{folder}", "--workdir", "/"]
    options += ["--memory", f"{config.max_memory_mb}m", "--memory-swap", f"{config.max_memory_mb}m"]
    options += ["--pids-limit", f"{config.max_processes}", "--cpus", f"{config.cpus}"]
    options += [*_ulimit("nofile", _OPEN_FILES), *_ulimit("core", 0), *_ulimit("nproc", _USER_PROCESSES)]
    options += [part for name, value in _ENVIRONMENT.items() for part in ("--env", f"{name}={value}")]
    options += ["--entrypoint", "sh"]
    if _program(config) == "docker":
        return [*options, *(["--runtime", config.runtime] if config.runtime else [])]
    return [
        *options,
        "--timeout",
        _late(config),
        "--read-only-tmpfs=false",
        "--http-proxy=false",
        "--image-volume=ignore",
    ]


def _ulimit(name: str, value: int) -> list[str]:
    value = allowed(name, value)
    return ["--ulimit", f"{name}={value}:{value}"]


@cache
def _look(config: ContainerConfig) -> str | tuple[Language, ...]:
    """Return the languages that the image runs, or why there is no container here."""
    program = _program(config)
    if shutil.which(program) is None:
        return "neither podman nor docker is installed" if config.program is None else f"{program} is not installed"
    try:
        result = Container(config, languages=("sh",)).exec(_FIRST, language="sh")
    except EnvironmentFailure as error:
        return f"a first program did not run: {error}"
    if not result.output.startswith("well\n"):
        return f"a first program ended with {' '.join(result.output.split())[:300] or result!r}"
    _, pids, python = result.output.split("\n")[:3]
    if pids not in ("", f"{config.max_processes}"):
        return (
            f"its limit of processes does not hold ({pids}): without root, {program} needs control groups of version 2"
        )
    return ("python", "sh") if python else ("sh",)
