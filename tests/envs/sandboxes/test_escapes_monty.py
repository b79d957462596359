"""Ways out of monty, tried for real: it has no host, so most of them have nothing to begin with."""

import os
import time

import psutil
import pytest

from agentrl import UserError
from agentrl_envs.sandboxes.monty import MontyConfig
from tests.support.each import each

pytestmark = pytest.mark.process

SECRET = "a1b2c3-secret"

# Each evaluates to loot, or raises.
ATTEMPTS = {
    "read /etc/passwd": "open('/etc/passwd').read()",
    "read /etc/shadow by pathlib": "__import__('pathlib').Path('/etc/shadow').read_text()",
    "climb by dots": "open('../../../../etc/passwd').read()",
    "read the process's environment": "open('/proc/self/environ').read()",
    "list the root": "[n for n in os.listdir('/') if n != 'work']",
    "write to the root": "open('/etc/evil', 'w').write('x')",
    "move a file out": "os.rename('a', '/etc/a')",
    "link to a file outside": "os.symlink('/etc/passwd', 'link')",
    "read the environment": "[v for v in os.environ.values()]",
    "read one variable": "os.getenv('AGENTRL_TEST_SECRET')",
    "run a command": "os.system('id')",
    "run a command by popen": "os.popen('id').read()",
    "import subprocess": "__import__('subprocess').run(['id'])",
    "fork": "os.fork()",
    "kill the parent": "os.kill(os.getppid(), 9)",
    "execute a program": "os.execv('/bin/sh', ['sh'])",
    "open a descriptor": "os.open('/etc/passwd', 0)",
    "read a descriptor": "os.read(0, 100)",
    "write into the protocol": "os.write(1, b'forged')",
    "write past the protocol": "sys.stdout.buffer.write(b'forged')",
    "reach the classes": "().__class__.__bases__[0].__subclasses__()",
    "reach the globals": "(lambda: 0).__globals__['__builtins__']",
    "reach the code": "(lambda: 0).__code__.replace(co_code=b'')",
    "reach the frames": "sys._getframe()",
    "reach the modules": "sys.modules['os'].system('id')",
    "trace": "sys.settrace(print)",
    "read source by its loader": "__loader__.get_data('/etc/passwd')",
    "format a way in": "'{0.__class__.__init__.__globals__}'.format(print)",
    "compile": "compile('1', 'x', 'exec')",
    "break in": "breakpoint()",
    "read input": "input()",
}
IMPORTS = (
    "socket",
    "ctypes",
    "subprocess",
    "multiprocessing",
    "threading",
    "signal",
    "pickle",
    "importlib",
    "mmap",
    "shutil",
)


@each("attempt", ATTEMPTS.values())
def test_it_stays_inside(attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TEST_SECRET", SECRET)
    code = f"import os, sys\ntry:\n  found = {attempt}\nexcept Exception:\n  found = ''\nprint('ESCAPED' if found else 'HELD')"
    with MontyConfig().build() as sandbox:
        sandbox.write("a", "1")
        result = sandbox.exec(code)
        assert "ESCAPED" not in result.output
        assert result.output == "HELD\n" or result.returncode != 0
        assert set(sandbox.paths()) <= {"a"}


def test_what_is_written_beside_the_folder_is_nowhere() -> None:
    with MontyConfig().build() as sandbox:
        assert sandbox.exec("print(open('../agentrl-evil', 'w').write('x'))").output == "1\n"
        assert sandbox.paths() == []
    assert not os.path.exists("/agentrl-evil")


@each("module", IMPORTS)
def test_modules_that_lead_out_are_not_there(module: str) -> None:
    with MontyConfig().build() as sandbox:
        result = sandbox.exec(f"import {module}\n{module}.{'x'}")
        assert result.returncode != 0
        assert "Error" in result.output


@pytest.mark.slow
@each(
    "bomb",
    [
        "while True: pass",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "x = []\nwhile True: x.append('a' * 1_000_000)",
        "'a' * 10**12",
        "10 ** 10 ** 10",
        "x = 'a'\nwhile True: x += x",
        "f = lambda: f()\nf()",
        "def f(): yield from f()\nlist(f())",
        "import re\nre.match('(a|a|aa)+$', 'a' * 50 + 'b')",
        "x = []\nfor _ in range(100_000): x = [x]\nprint(x)",
        "class A:\n  def __getattr__(self, name): return getattr(self, name)\nA().x",
        "eval('(' * 100_000)",
        "sorted(range(10**9))",
        "import time\nwhile True: time.sleep(1000)",
        "for n in range(10**9): open(str(n), 'w')",
        "import os\nfor n in range(10**9): os.makedirs(f'{n}/' + 'a/' * 100)",
        "while True: print('x' * 10_000)",
        "for n in range(10**9): open('a', 'a').write('x' * 1_000_000)",
        "open('a', 'w').write('x' * 15_000_000)\nwhile True: open('a').read()",
    ],
)
def test_a_bomb_is_bounded(bomb: str) -> None:
    """It ends soon after its deadline, and neither this process nor the interpreter's takes more than it was given."""
    with MontyConfig(timeout_s=1, max_memory_mb=50, max_files_mb=20).build() as sandbox:
        sandbox.exec("1")
        before, begun = psutil.Process().memory_info().rss, time.monotonic()
        sandbox.exec(bomb)
        assert time.monotonic() - begun < 15
        assert psutil.Process().memory_info().rss - before < 200_000_000
        interpreters = [child for child in psutil.Process().children() if "monty" in child.name()]
        assert all(child.memory_info().rss < 500_000_000 for child in interpreters)
        assert sandbox.exec("print(1)").output == "1\n"


def test_a_crash_of_the_interpreter_ends_its_run_alone() -> None:
    with MontyConfig().build() as sandbox:
        sandbox.exec("1")
        for child in psutil.Process().children():
            if "monty" in child.name():
                os.kill(child.pid, 9)
        assert sandbox.exec("print(1)").output.endswith(("1\n", "\n"))
        assert sandbox.exec("print(2)").output == "2\n"


def test_time_and_chance_are_the_same_again() -> None:
    code = "import datetime, random, time\nprint(datetime.datetime.now(), random.random(), time.time())"
    with MontyConfig().build() as sandbox:
        assert sandbox.exec(code).output == sandbox.exec(code).output


def test_a_forked_process_is_refused_at_once_and_its_parent_goes_on() -> None:
    with MontyConfig().build() as sandbox:
        sandbox.exec("1")
        if (pid := os.fork()) == 0:
            try:
                sandbox.exec("1")
            except UserError as error:
                os._exit(7 if "does not survive a fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert sandbox.exec("print('parent')").output == "parent\n"
