"""Containers of podman or docker: each `exec` is one of its own, from an image that all share, and gone with it."""

import itertools
import os
import resource
import secrets
import shutil
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl import ConfigError, EnvironmentFailure, ExecResult, Language, SandboxConfig
from agentrl_envs.sandboxes.bubblewrap import BEGUN, archive_of, failure, outcome
from agentrl_envs.sandboxes.files import Files, FileSandbox
from agentrl_envs.sandboxes.unsafe import START_S, Finished, run_process

_SECCOMP = Path(__file__).parents[1] / "data" / "seccomp.json"
"""Filter of system calls, the same as bubblewrap's: those of programs allow sockets of the hypervisor, and new namespaces."""
_RUNS = itertools.count()
_USER = "65534:65534"
_OPEN_FILES = 1024
_OF_THE_USER = 10_000
"""Processes of the user: of all containers, each of which has `max_processes`."""
_ENVIRONMENT = {"HOME": "/work", "PYTHONPATH": "/work", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}

# As the script of bubblewrap, for any image with a shell and tar, busybox's too. Process 1 is `timeout`, which nothing in here
# can kill: the container ends by its deadline also where nobody waits for it.
_SCRIPT = f"""
echo '{BEGUN.decode().strip()}' >&2
exec 3>&2 2>&1
tar -xmf - -C / && cd /work || exit 125
"$@" </dev/null 3>&-
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

    The image needs `sh`, `tar` and `timeout`, as nearly all have, and `python3` to run Python. Rootless podman takes less from
    the machine than anything that runs as root.
    """

    name: Literal["container"] = "container"
    image: str = "docker.io/library/python:3.12-slim"
    """Image that all episodes share. It is never pulled here: pull, build or import it before."""
    program: Literal["podman", "docker"] | None = None
    """Program that runs it. None: podman if it is installed, else docker."""
    runtime: str | None = None
    """OCI runtime, such as `runc`, or `runsc` (gVisor) for a kernel of its own. None: the program's."""
    network: str = "none"
    """Network of the program to join. `none`: there is no way out."""
    max_processes: Annotated[int, Field(ge=8, le=100_000)] = 64
    """Processes and threads at the same time, four of which are the sandbox's own. All together have `max_memory_mb`, in which
    their files count."""
    cpus: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Processor time of all processes together, in cores."""

    def build(self) -> "Container":
        """Return a new sandbox.

        Raises:
            ConfigError: if the program or the image is missing, or containers cannot run here.
        """
        found = _look(self)
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
    done = run_process(
        [*_client(config), *_run_options(config, name), config.image, *_process(config), *command],
        stdin=archive,
        timeout_s=config.timeout_s,
        max_output=config.max_output_bytes,
        max_second=2 * config.max_files_mb * 1_000_000 + 1_000_000,
        environment=os.environ,  # of the client alone
        begins_with=BEGUN,
    )
    if done.timed_out or done.is_cut:  # the client was killed, and the container was not
        run_process(
            [*_client(config), "rm", "--force", *(["--time", "0"] if _program(config) == "podman" else []), name],
            timeout_s=START_S,
            max_output=0,
            max_second=1000,
            environment=os.environ,
        )
    return done


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
    options += [*_ulimit("nofile", _OPEN_FILES), *_ulimit("core", 0), *_ulimit("nproc", _OF_THE_USER)]
    options += [part for name, value in _ENVIRONMENT.items() for part in ("--env", f"{name}={value}")]
    if _program(config) == "docker":
        return [*options, *(["--runtime", config.runtime] if config.runtime else []), "--entrypoint", "timeout"]
    options += ["--read-only-tmpfs=false", "--http-proxy=false", "--image-volume", "ignore"]
    return [*options, "--entrypoint", "timeout"]


def _ulimit(name: str, value: int) -> list[str]:
    """Return an option, no higher than this process itself may have."""
    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    return ["--ulimit", f"{name}={value}:{value}"]


def _process(config: ContainerConfig) -> list[str]:
    """Return the first process's arguments: it ends a little later than whoever waits for it would end it."""
    return ["-s", "KILL", f"{int(config.timeout_s) + 2}", "sh", "-c", _SCRIPT, "sh"]


@cache
def _look(config: ContainerConfig) -> str | tuple[Language, ...]:
    """Return the languages that the image runs, or why there is no container here."""
    program = _program(config)
    if shutil.which(program) is None:
        return "neither podman nor docker is installed" if config.program is None else f"{program} is not installed"
    sandbox = Container(config.model_copy(update={"timeout_s": 60.0, "max_output_bytes": 1000}), languages=("sh",))
    try:
        result = sandbox.exec(_FIRST, language="sh")
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
