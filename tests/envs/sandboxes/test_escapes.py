"""Ways out of bubblewrap, tried for real: each attempt says ESCAPED where it got out, and HELD where it was stopped."""

import os
import platform
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl import ExecResult
from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import Bubblewrap, BubblewrapConfig
from tests.support.each import each

WHY_NOT = bubblewrap._problem(BubblewrapConfig())
pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(WHY_NOT), reason=f"bubblewrap: {WHY_NOT}")]
CAP = ["prlimit", "--nproc=64", "--as=1000000000", "--cpu=90", "--fsize=100000000", "--core=0", "--"]
"""Around the sandbox, whatever it does not hold: none of these attempts may reach the machine."""
SECRET = "a1b2c3-secret"

_TRY = """
import ctypes, os, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def attempt():
{attempt}
try:
    found = attempt()
    print('ESCAPED' if found else 'HELD', repr(found)[:200])
except (Exception, SystemExit) as error:
    print('HELD', type(error).__name__, error)
"""


@pytest.fixture
def capped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bubblewrap._bubblewrap
    monkeypatch.setattr(bubblewrap, "_bubblewrap", lambda fd: [*CAP, *made(fd)])


@pytest.fixture
def sandbox(capped: None) -> Iterator[Bubblewrap]:
    with BubblewrapConfig(max_memory_mb=200, timeout_s=20).build() as sandbox:
        yield sandbox


def tried(sandbox: Bubblewrap, attempt: str, **names: Any) -> ExecResult:
    code = textwrap.indent(textwrap.dedent(attempt).strip(), "    ")
    for name, value in names.items():
        code = code.replace(name, repr(value))
    return sandbox.exec(_TRY.replace("{attempt}", code))


def assert_held(result: ExecResult) -> None:
    assert "ESCAPED" not in result.output, result.output
    assert "HELD" in result.output, result


# What is returned is the loot; nothing, or an exception, is an attempt that was held.
ATTEMPTS = {
    # Files of the host.
    "read a file of the host": "return open(HOST_FILE).read()",
    "read /etc/shadow": "return open('/etc/shadow').read()",
    "read the users of the host": "return open('/etc/passwd').read()",
    "list the host's homes": """
        return [n for p in ('/root', '/home') if os.path.isdir(p) for n in os.listdir(p)
                if f'{p}/{n}/' not in sys.base_prefix]
    """,
    "list the host's temporary files": "return [n for n in os.listdir('/tmp') if n != 'main']",
    "read through a link": "os.symlink(HOST_FILE, 'link'); return open('link').read()",
    "read through a hard link": "os.link('/etc/shadow', 'link'); return open('link').read()",
    "climb by dots": "return open('/work/' + '../' * 20 + HOST_FILE.lstrip('/')).read()",
    "read through the root of the first process": "return os.listdir('/proc/1/root/')",
    "open a file by its handle": "return call(304, -100, b'\\0' * 128, 0) >= 0",
    "look for hidden tests": "import agentrl_envs; return agentrl_envs.__file__",
    "look for hidden tests among what is installed": """
        return [f for d in ('/usr', '/opt', sys.base_prefix) for f, _, _ in os.walk(d) if 'agentrl' in f]
    """,
    # Writing to the system.
    "write to /usr": "open('/usr/bin/evil', 'w').write('x'); return True",
    "write to the interpreter's library": "open(os.__file__, 'a').write('x'); return True",
    "write to /etc": "open('/etc/evil', 'w').write('x'); return True",
    "write to the root": "open('/evil', 'w').write('x'); return True",
    "write to /dev": "open('/dev/evil', 'w').write('x'); return True",
    "write to /dev/shm": "open('/dev/shm/evil', 'w').write('x'); return True",
    "set the kernel's core pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); return True",
    "press the magic key": "open('/proc/sysrq-trigger', 'w').write('h'); return True",
    "change the system's time": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time()); return True",
    "change the host's name": "socket.sethostname('evil'); return True",
    "read the kernel's tree": "return os.listdir('/sys')",
    # The network.
    "reach a server of the host": "return socket.create_connection(('127.0.0.1', PORT), timeout=2)",
    "reach a server by IPv6": "return socket.create_connection(('::1', PORT), timeout=2)",
    "reach an address outside": "return socket.create_connection(('1.1.1.1', 53), timeout=2)",
    "look a name up": "return socket.getaddrinfo('example.com', 80)",
    "send a datagram": "s = socket.socket(2, 2); s.connect(('8.8.8.8', 53)); s.send(b'x'); return True",
    "reach a socket in the host's files": "s = socket.socket(1); s.connect(UNIX_SOCKET); return True",
    "reach an abstract socket": "s = socket.socket(1); s.connect(b'\\0' + ABSTRACT); return True",
    "reach the hypervisor": "s = socket.socket(40, 1); s.settimeout(2); s.connect((2, 1024)); return True",
    "open a vsock at all": "return socket.socket(40, 1)",
    "sniff packets": "return socket.socket(17, 3)",
    "send raw packets": "return socket.socket(2, 3, 1)",
    "ask the kernel for its routes": "return socket.socket(16, 3)",
    "use the kernel's ciphers": "return socket.socket(38, 5)",
    # What leaks from the process that started it.
    "read the environment": "return [v for v in os.environ.values() if SECRET_WORD in v]",
    "read the first process's environment": "return SECRET_WORD.encode() in open('/proc/1/environ', 'rb').read()",
    "read every process's environment": """
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                if SECRET_WORD.encode() in open(f'/proc/{pid}/environ', 'rb').read():
                    return pid
            except PermissionError:
                pass
    """,
    "read the folders of the host in the command lines": """
        lines = [open(f'/proc/{pid}/cmdline').read() for pid in filter(str.isdigit, os.listdir('/proc'))]
        return [line for line in lines if '--ro-bind' in line or '--tmpfs' in line or 'site-packages' in line]
    """,
    "use inherited descriptors": "return [n for n in map(int, os.listdir('/proc/self/fd')) if n > 3]",
    "use the descriptors of what holds it": """
        for pid in filter(str.isdigit, os.listdir('/proc')):
            for n in (os.listdir(f'/proc/{pid}/fd') if os.access(f'/proc/{pid}/fd', os.R_OK) else ()):
                try:
                    path = os.readlink(f'/proc/{pid}/fd/{n}')
                except OSError:
                    continue
                if not path.startswith(('pipe:', '/dev/null', '/proc', '/tmp/main', '/work')):
                    return path
    """,
    "see the host's processes": "return [p for p in filter(str.isdigit, os.listdir('/proc')) if int(p) > 100]",
    "kill the process that started it": "os.kill(HOST_PID, 9); return True",
    "kill the first process": "os.kill(1, 9); return True",
    "trace the process that holds it": "return call(101, 16, os.getppid(), 0, 0) == 0",
    "read the memory of the process that holds it": "return call(310, os.getppid(), 0, 0, 0, 0, 0) >= 0",
    "type into the terminal": "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x'); return True",
    "open the terminal": "return open('/dev/tty')",
    "read keys of the user": "return call(250, 0, -3, 0)",
    # More rights.
    "become root": "os.setuid(0); return os.getuid() == 0",
    "keep a capability": """
        return [l for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm')) and int(l.split()[1], 16)]
    """,
    "gain rights by a program": "return [l for l in open('/proc/self/status') if l == 'NoNewPrivs:\\t0\\n']",
    "run a set-user-ID program": "r = subprocess.run(['su', '-c', 'id -u'], capture_output=True); return r.returncode == 0",
    "find a mount that honours set-user-ID": """
        return [l for l in open('/proc/self/mounts') if 'nosuid' not in l and not l.startswith('devpts')]
    """,
    "make a set-user-ID program": "import shutil; shutil.copy('/bin/sh', 'sh'); os.chown('sh', 0, 0); return True",
    "mount": "return call(165, b'none', b'/tmp', b'tmpfs', 0, 0) == 0",
    "mount by the newer calls": "return call(430, b'tmpfs', 0)",
    "mount the root again": "return call(165, b'none', b'/', 0, 4096 | 32, 0) == 0",
    "chroot": "os.chroot('/tmp'); return True",
    "make a namespace": "return call(272, 0x10000000) == 0",
    "make a namespace by a program": "r = subprocess.run(['unshare', '-Ur', 'id']); return r.returncode == 0",
    "make a namespace by clone": """
        pid = call(56, 0x10000000 | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        return True
    """,
    "make a namespace by clone3": "return call(435, (ctypes.c_uint64 * 11)(0x10000000), 88)",
    "join the namespaces of the first process": "return call(308, os.open('/proc/1/ns/net', 0), 0) == 0",
    "make a device": "os.mknod('disk', 0o60666, os.makedev(254, 0)); return open('disk', 'rb').read(1)",
    "read the machine's memory": "return open('/dev/mem', 'rb').read(1)",
    "read a disk": "return [n for n in os.listdir('/dev') if n.startswith(('sd', 'vd', 'nvme', 'loop'))]",
    "load a program into the kernel": "return call(321, 5, 0, 0)",
    "watch the kernel": "return call(298, 0, 0, -1, -1, 0)",
    "use a ring of the kernel": "return call(425, 8, ctypes.create_string_buffer(120))",
    "use faults of pages": "return call(323, 0)",
    "use calls of another table": "return call(0x40000000 + 39)",
    "load a module": "return call(313, 0, b'', 0) == 0",
    "read the kernel's log": "return call(103, 3, ctypes.create_string_buffer(100), 100)",
    "raise its own limits": """
        import resource
        for name in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
            try:
                resource.setrlimit(name, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                return name
            except (ValueError, OSError):
                pass
    """,
    "go before others": "return os.nice(-5) < 0",
    # Memory that no process owns.
    "take shared memory of System V": "return call(29, 0, 100_000_000, 0o1600)",
    "take a file in memory": "return os.memfd_create('x')",
    "take queues of messages": "return call(68, 0, 0o1600)",
    # By way of Python.
    "unpickle a command": """
        import pickle
        class Evil:
            def __reduce__(self):
                return (eval, (f"open({HOST_FILE!r}).read()",))
        return pickle.loads(pickle.dumps(Evil()))
    """,
    "import what is installed": "import numpy; return numpy.__file__",
    "trace its caller": """
        sys.settrace(lambda frame, *_: None)
        frame = sys._getframe()
        while frame.f_back:
            frame = frame.f_back
        return SECRET_WORD in map(str, frame.f_globals.values())
    """,
}


OTHER_WAY = (
    *("read a file of the host", "reach a server of the host", "become root", "keep a capability", "make a namespace"),
    *("make a namespace by clone", "mount", "write to /usr", "read the first process's environment"),
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Things of the host that an attempt may try to reach."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text(SECRET)
    os.chmod(folder / "secret", 0o644)
    abstract = f"agentrl-test-{os.getpid()}"
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.socket(socket.AF_UNIX)) as in_files,
        closing(socket.socket(socket.AF_UNIX)) as in_name,
        (folder / "secret").open() as inherited,
    ):
        in_files.bind(str(folder / "s"))
        in_name.bind(f"\0{abstract}")
        in_files.listen()
        in_name.listen()
        os.set_inheritable(inherited.fileno(), True)
        os.environ["AGENTRL_TEST_SECRET"] = SECRET
        try:
            yield {
                "HOST_FILE": str(folder / "secret"),
                "PORT": server.getsockname()[1],
                "UNIX_SOCKET": str(folder / "s"),
                "ABSTRACT": abstract.encode(),
                "SECRET_WORD": SECRET,
                "HOST_PID": os.getpid(),
            }
        finally:
            del os.environ["AGENTRL_TEST_SECRET"]


@each(
    "attempt",
    [
        pytest.param(code, id=name, marks=[] if name in OTHER_WAY else pytest.mark.slow)
        for name, code in ATTEMPTS.items()
    ],
)
def test_it_stays_inside(sandbox: Bubblewrap, host: dict[str, Any], attempt: str) -> None:
    if "call(" in attempt and platform.machine() != "x86_64":
        pytest.skip("these are the numbers of x86-64's calls")
    assert_held(tried(sandbox, attempt, **host))


def test_what_the_attempts_reach_for_can_be_had_outside(host: dict[str, Any]) -> None:
    assert Path(host["HOST_FILE"]).read_text(encoding="utf-8") == SECRET
    with socket.create_connection(("127.0.0.1", host["PORT"])), socket.socket(socket.AF_UNIX) as client:
        client.connect(b"\0" + host["ABSTRACT"])


def test_there_are_thirty_and_more() -> None:
    assert len(ATTEMPTS) >= 30


def test_the_way_of_who_is_not_root_holds_the_same(monkeypatch: pytest.MonkeyPatch, host: dict[str, Any]) -> None:
    """A namespace of users instead of a user for each run: root becomes someone else here, with the system's Python."""
    if os.geteuid() != 0:
        pytest.skip("this is the way that all the others went")
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("agentrl's own Python may be where no one else can read it, and there is no /usr/bin/python3")
    made = bubblewrap._bubblewrap
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *CAP]
    monkeypatch.setattr(bubblewrap, "_bubblewrap", lambda fd: [*become, *made(fd)])
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    config = BubblewrapConfig(max_memory_mb=200, timeout_s=20, max_processes=8, python="/usr/bin/python3")
    if problem := bubblewrap._problem(config):
        pytest.skip(f"only root may make namespaces here: {problem}")
    with config.build() as sandbox:
        assert sandbox.exec("id -u", language="sh").output == "65534\n"
        for name in OTHER_WAY:
            assert_held(tried(sandbox, ATTEMPTS[name], **host))
        forks = "import os, time\nfor n in range(20):\n  if not os.fork():\n    time.sleep(1)\n    os._exit(0)"
        assert "Resource temporarily unavailable" in sandbox.exec(forks).output


def test_a_daemon_dies_with_its_run(sandbox: Bubblewrap) -> None:
    """It forks twice, leads a session of its own, ignores what it can, and closes all that it was given."""
    marker = f"agentrl-daemon-{os.getpid()}"
    result = sandbox.exec(
        f"""
import os, signal, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for n in range(1, 65):
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
os.closerange(0, 64)
os.execv('/bin/sh', ['sh', '-c', 'trap "" 1 2 3 13 15; sleep 600 # {marker}'])
"""
    )
    assert not result.timed_out
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or ())] == []


def test_ignored_signals_do_not_keep_it(capped: None) -> None:
    with BubblewrapConfig(timeout_s=1).build() as sandbox:
        begun = time.monotonic()
        code = (
            "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
        )
        assert sandbox.exec(f"{code}while True: pass").timed_out
        assert sandbox.exec(f"{code}signal.pause()").timed_out
        assert time.monotonic() - begun < 30


def test_a_flood_of_output_neither_fills_memory_nor_lasts(capped: None) -> None:
    with BubblewrapConfig(timeout_s=1, max_output_bytes=1000).build() as sandbox:
        before = psutil.Process().memory_info().rss
        result = sandbox.exec("import os\nwhile True: os.write(1, b'x' * 65536)")
        assert (result.timed_out, result.output) == (True, "x" * 1000)
        assert result.num_cut > 1_000_000
        assert psutil.Process().memory_info().rss - before < 50_000_000


def test_a_flood_into_the_archive_ends_it(capped: None) -> None:
    """The archive of files comes by a pipe that a program can find; what it writes there is bounded too."""
    with BubblewrapConfig(timeout_s=20, max_files_mb=1).build() as sandbox:
        sandbox.write("a", "1")
        code = "import os\nwith open(f'/proc/{os.getppid()}/fd/3', 'wb') as f:\n  while True: f.write(b'x' * 65536)"
        result = sandbox.exec(code)
        assert (result.timed_out, sandbox.paths(), sandbox.read("a")) == (False, ["a"], b"1")


def test_a_forged_archive_names_nothing_outside(sandbox: Bubblewrap) -> None:
    sandbox.write("a", "1")
    forged = """
import io, os, tarfile
buffer = io.BytesIO()
with tarfile.open(fileobj=buffer, mode='w', format=tarfile.USTAR_FORMAT) as archive:
    for name in NAMES:
        entry = tarfile.TarInfo(name)
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b'evil'))
with open(f'/proc/{os.getppid()}/fd/3', 'wb') as f:
    f.write(buffer.getvalue())
os.kill(os.getppid(), 9)
"""
    sandbox.exec(forged.replace("NAMES", "['../../evil', '/tmp/evil']"))
    assert (sandbox.paths(), Path("/tmp/evil").exists(), Path("/evil").exists()) == (["a"], False, False)
    sandbox.exec(forged.replace("NAMES", "['b']"))  # what it could have written in its folder as well
    assert set(sandbox.paths()) <= {"a", "b"}


def test_links_and_pipes_are_not_handed_out(sandbox: Bubblewrap, host: dict[str, Any]) -> None:
    code = f"import os\nos.symlink({host['HOST_FILE']!r}, 'l')\nos.symlink('/', 'd')\nos.mkfifo('f')\nopen('a', 'w').write('1')"
    assert sandbox.exec(code).returncode == 0
    assert sandbox.paths() == ["a"]
    sandbox.exec("import os\nos.mkdir('sub')\nos.symlink('..', 'sub/up')")
    assert sandbox.exec("ls sub | wc -l", language="sh").output.strip() == "0"


def test_an_overflown_stack_ends_the_program_alone(sandbox: Bubblewrap) -> None:
    assert sandbox.exec("import faulthandler\nfaulthandler._stack_overflow()").returncode == 139
    assert sandbox.exec("print(1)").output == "1\n"


def test_a_killed_script_ends_the_run_at_once(sandbox: Bubblewrap) -> None:
    begun = time.monotonic()
    result = sandbox.exec("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)")
    assert result.returncode != 0
    assert time.monotonic() - begun < 15


def test_an_attempt_cannot_be_seen_by_the_next(sandbox: Bubblewrap) -> None:
    sandbox.exec("open('/tmp/left', 'w').write('x')")
    assert sandbox.exec("import os\nprint(os.path.exists('/tmp/left'))").output == "False\n"


def test_users_differ_between_runs(sandbox: Bubblewrap) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run code as other users")
    users = {sandbox.exec("id -u", language="sh").output for _ in range(3)}
    assert len(users) == 3
    assert all(int(user) >= 1_900_000_000 for user in users)


# The dangerous ones: under limits of their own, and under CAP around them.


def test_a_fork_bomb_is_bounded(capped: None) -> None:
    with BubblewrapConfig(timeout_s=3, max_memory_mb=50, max_processes=8).build() as sandbox:
        most = [0]
        ended = threading.Event()
        others = set(psutil.Process().children(recursive=True))  # servers of other tests

        def watch() -> None:
            while not ended.wait(0.1):
                most[0] = max(most[0], len(set(psutil.Process().children(recursive=True)) - others))

        watcher = threading.Thread(target=watch)
        watcher.start()
        result = sandbox.exec("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass")
        ended.set()
        watcher.join()
        assert result.timed_out
        assert most[0] <= 12
        assert sandbox.exec("print(1)").output == "1\n"


def test_a_bomb_of_threads_is_bounded(capped: None) -> None:
    with BubblewrapConfig(timeout_s=10, max_memory_mb=200, max_processes=8).build() as sandbox:
        code = (
            "import threading, time\nn = 0\ntry:\n  while n < 1000:\n    threading.Thread(target=time.sleep, args=(1,))"
        )
        result = sandbox.exec(f"{code}.start()\n    n += 1\nexcept RuntimeError: pass\nprint(n)")
        assert 0 < int(result.output.split()[0]) < 8


def test_a_memory_bomb_is_bounded(capped: None) -> None:
    with BubblewrapConfig(timeout_s=10, max_memory_mb=100).build() as sandbox:
        result = sandbox.exec("x = []\nwhile True: x.append(bytearray(b'x' * 5_000_000))")
        assert "MemoryError" in result.output
        mapped = "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 5_000_000))"
        assert "Cannot allocate memory" in sandbox.exec(mapped).output


def test_full_folders_are_bounded(capped: None) -> None:
    with BubblewrapConfig(timeout_s=20, max_files_mb=2).build() as sandbox:
        code = "import os\nn = 0\ntry:\n  for i in range(1000):\n    n += open(f'{FOLDER}/{i}', 'wb').write(b'x' * 100_000)\n"
        for folder in ("/work", "/tmp"):
            result = sandbox.exec(f"{code}except OSError as error: print(n, error)".replace("{FOLDER}", folder))
            assert "No space left on device" in result.output
            assert int(result.output.split()[0]) <= 2_100_000
        assert "File too large" in sandbox.exec("open('big', 'wb').truncate(10**13)").output
        assert sum(len(sandbox.read(path)) for path in sandbox.paths()) <= 2_000_000


def test_open_files_are_bounded(sandbox: Bubblewrap) -> None:
    code = "import os\nn = 0\ntry:\n  while n < 5000:\n    os.pipe(); n += 1\nexcept OSError: pass\nprint(n)"
    assert int(sandbox.exec(code).output) < 64


@pytest.mark.slow
def test_nothing_of_the_system_can_be_written(sandbox: Bubblewrap) -> None:
    folders = sandbox.exec("find / -xdev -writable -type d 2>/dev/null", language="sh").output.split()
    assert set(folders) <= {"/tmp", "/work"}
    assert sandbox.exec("find /usr /etc /lib -writable ! -type l 2>/dev/null", language="sh").output == ""
