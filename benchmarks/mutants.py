"""Mutants that a tier of the tests lets through, out of 300 drawn from the files of `[tool.mutmut]`.

    python -m benchmarks.mutants --out FILE [--tier default|all] [--number 300] [--only FILE] [--every] [--also PATH ...]
    python -m benchmarks.mutants --table FILE [FILE]

The mutants are those of mutmut. One is named by its function, its change and which of equal changes of the function it is,
never by its file, and the ones with the smallest hashes of these names are drawn: moving a function changes nothing.

The tests of `[tool.mutmut]` (and those of `--also`) are collected once and run once, to learn which statements each reaches
and how long it takes. Each mutant then has a forked process of its own that replaces the code of the function and runs the
tests that reach the statement, the quickest first, up to the first failure (`--every`: all of them). A mutant is out of
time if a test takes ten times as long as it did and 5 s more, or a minute. Hypothesis tries as many examples as in the tier
and does not shrink. `HYPOTHESIS_PROFILE=full` belongs to `--tier all` if the tree has that profile.

FILE has one mutant a line, as JSON; `--only` tries those in a FILE, of this tree or another. `--table` prints the table of
one FILE and what survived, or of two and what the second lets through and the first does not. Not seen: code that runs at
import, and tests in another process.
"""

import argparse
import ast
import difflib
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
TIERS = {"default": "not slow and not gpu", "all": "not gpu"}
MEMORY = 12 << 30
"""Bytes of address space of the process of a mutant, which may allocate in a loop without end."""


@dataclass(slots=True, kw_only=True)
class Mutant:
    """A change of one function, and what became of it."""

    function: str
    """Qualified name."""
    change: str
    """The node before and after, as source."""
    index: int
    """Place among equal changes of the function."""
    module: str
    diff: str = ""
    """Changed lines."""
    line: int = 0
    """First line of the statement that is changed."""
    source: str = field(default="", repr=False)
    """The module with the change."""
    state: str = ""
    """killed, out of time, survived, or not reached."""
    by: list[str] = field(default_factory=list)
    """Tests that failed."""
    seconds: float = 0.0

    @property
    def name(self) -> tuple[str, str, int]:
        """Identity of the mutant in any tree."""
        return self.function, self.change, self.index

    @property
    def rank(self) -> str:
        """Order in which mutants are drawn."""
        return hashlib.sha256(repr(self.name).encode()).hexdigest()


def path_of(module: str) -> Path:
    """Find the file of a module in the tree."""
    relative = module.replace(".", "/") + ".py"
    return next(path for root in ("", "credit", "envs") if (path := ROOT / root / relative).exists())


def codes(code: CodeType) -> Iterator[CodeType]:
    """Walk through the code objects in a code object."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from codes(const)


def code_of(tree: str | ast.Module, module: str, function: str) -> CodeType | None:
    """Compile a module and return the code of a function, if there is one of that name and it compiles."""
    try:
        found = [c for c in codes(compile(tree, path_of(module), "exec")) if c.co_qualname == function]
    except SyntaxError:
        return None
    return found[0] if len(found) == 1 else None


def statement(source: str, line: int) -> int:
    """Return the first line of the innermost statement at a line; of a definition, that of its first statement."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt) and n.lineno <= line <= n.end_lineno]  # type: ignore[operator]
    node = max(nodes, key=lambda n: (n.lineno, -n.end_lineno))  # type: ignore[operator]
    return node.body[0].lineno if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else node.lineno


def draw(number: int, *, only: Collection[tuple[str, str, int]] = ()) -> list[Mutant]:
    """Draw mutants from the files of `[tool.mutmut]`, or find those of some names."""
    import libcst as cst
    from mutmut.mutation.file_mutation import create_mutations

    drawn: list[tuple[Mutant, Any, Any]] = []
    count = Counter[tuple[str, str]]()
    for path in CONFIG["only_mutate"]:
        module = path.removesuffix(".py").replace("/", ".")
        tree, mutations, _, _ = create_mutations(path, path_of(module).read_text(encoding="utf-8"))
        classes = {
            method: node.name.value
            for node in tree.body
            if isinstance(node, cst.ClassDef)
            for method in node.body.body
            if isinstance(method, cst.FunctionDef)
        }
        for mutation in mutations:
            outer = mutation.contained_by_top_level_function
            if not isinstance(outer, cst.FunctionDef):
                continue
            function = f"{classes[outer]}.{outer.name.value}" if outer in classes else outer.name.value
            texts = (tree.code_for_node(n) for n in (mutation.original_node, mutation.mutated_node))
            change = " -> ".join(" ".join(text.split()) for text in texts)
            mutant = Mutant(function=function, change=change, index=count[function, change], module=module)
            count[function, change] += 1
            if not only or mutant.name in only:
                drawn.append((mutant, tree, mutation))
    chosen: list[Mutant] = []
    for mutant, tree, mutation in sorted(drawn, key=lambda each: each[0].rank):
        mutant.source = tree.deep_replace(mutation.original_node, mutation.mutated_node).code
        code, before = code_of(mutant.source, mutant.module, mutant.function), tree.code
        original = code_of(before, mutant.module, mutant.function)
        if code is None or original is None or code.co_freevars != original.co_freevars:
            continue
        lines = list(difflib.unified_diff(before.splitlines(), mutant.source.splitlines(), lineterm="", n=0))[2:]
        mutant.diff = "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[0] != "@")
        pairs = zip(before.splitlines(), mutant.source.splitlines(), strict=False)
        first = next(number for number, (a, b) in enumerate(pairs, start=1) if a != b)
        mutant.line = statement(before, first)
        chosen.append(mutant)
        if not only and len(chosen) == number:
            break
    return chosen


def function_of(module: str, name: str) -> FunctionType:
    """Find the function of a qualified name."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = vars(found)[part]
    found = getattr(found, "__func__", found)
    assert isinstance(found, FunctionType), f"{module}.{name} is {found!r}"
    return found


def put(mutant: Mutant) -> None:
    """Replace the function in this process, wherever it is referred to."""
    function = function_of(mutant.module, mutant.function)
    code = code_of(mutant.source, mutant.module, mutant.function)
    assert code is not None
    function.__code__ = code
    before, after = (_arguments(s, mutant.function) for s in (path_of(mutant.module).read_text("utf-8"), mutant.source))
    if ast.dump(before) != ast.dump(after):

        def value(node: ast.expr) -> Any:
            return eval(compile(ast.Expression(node), "default", "eval"), function.__globals__)

        named = {a.arg: value(d) for a, d in zip(after.kwonlyargs, after.kw_defaults, strict=True) if d is not None}
        function.__defaults__ = tuple(value(node) for node in after.defaults)
        function.__kwdefaults__ = named


def _arguments(source: str, function: str) -> ast.arguments:
    body: Any = ast.parse(source).body
    for name in function.split("."):
        found = next(node for node in body if getattr(node, "name", None) == name)
        body = found.body
    return found.args  # type: ignore[no-any-return]


class _Notes(ast.NodeTransformer):
    """Adds a note of its line before each statement of a function."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            return node
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                noted = []
                for each in body:
                    noted += [*ast.parse(f"_seen_lines.add((__name__, {each.lineno}))").body, each]
                setattr(node, name, noted)
        return node


@dataclass(slots=True, kw_only=True)
class Reach:
    """Lines that one test reached when nothing was changed."""

    lines: set[tuple[str, int]]
    seconds: float
    passed: bool


class Trial:
    """A plugin of pytest that tries mutants in place of running the tests once."""

    def __init__(self, mutants: list[Mutant], *, out: Path, every: bool, longest: float) -> None:
        self.mutants, self.out, self.every, self.longest = mutants, out, every, longest
        self.failed: list[str] = []
        self.stop = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Look for no smaller example."""
        settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure of a test or of a part of it."""
        if report.failed:
            self.failed.append(report.nodeid)
            if self.stop:
                _leave(self.failed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Learn what the tests reach, then try one mutant after the other."""
        import gc

        import torch

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()
        begin = time.perf_counter()
        reached: list[Reach] = [Reach(**each) for each in eval(_forked(lambda: self._learn(session.items)) or "[]")]
        assert len(reached) == len(session.items), "the tests could not be run without a mutant"
        print(f"{len(reached)} tests, {sum(r.seconds for r in reached):.0f} s of the processor, seen in", end=" ")
        print(f"{time.perf_counter() - begin:.0f} s")
        for item, reach in zip(session.items, reached, strict=True):
            if not reach.passed or reach.seconds > self.longest:
                print(f"left out: {item.nodeid}, {'too long' if reach.passed else 'fails'}, {reach.seconds:.0f} s")
        by_line = defaultdict[tuple[str, int], list[tuple[float, int]]](list)
        for place, reach in enumerate(reached):
            if reach.passed and reach.seconds <= self.longest:
                for line in reach.lines:
                    by_line[line].append((reach.seconds, place))
        for mutant in self.mutants:
            tests = sorted(by_line[mutant.module, mutant.line])
            self._try(mutant, [(session.items[place], seconds) for seconds, place in tests])
            record = asdict(mutant)
            del record["source"]
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{time.perf_counter() - begin:.0f} s in all", dict(Counter(m.state for m in self.mutants)))
        return True

    def _learn(self, items: list[pytest.Item]) -> None:
        seen = set[tuple[str, int]]()
        for module in {mutant.module for mutant in self.mutants}:
            vars(importlib.import_module(module))["_seen_lines"] = seen
            noted = _Notes().visit(ast.parse(path_of(module).read_text(encoding="utf-8")))
            ast.fix_missing_locations(noted)
            for function in {mutant.function for mutant in self.mutants if mutant.module == module}:
                code = code_of(noted, module, function)
                assert code is not None
                function_of(module, function).__code__ = code
        reached = []
        for item in items:
            seen.clear()
            failures, begin = len(self.failed), time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=_next(items, item))
            passed, seconds = len(self.failed) == failures, time.process_time() - begin
            reached.append(asdict(Reach(lines=set(seen), seconds=round(seconds, 4), passed=passed)))
        _leave(reached)

    def _try(self, mutant: Mutant, tests: list[tuple[pytest.Item, float]]) -> None:
        def run() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            put(mutant)
            self.stop = not self.every
            items = [item for item, _ in tests]
            for place, (item, seconds) in enumerate(tests):
                # Without a handler, either signal ends the process, even within a loop of torch.
                signal.setitimer(signal.ITIMER_PROF, 5 + 10 * seconds)
                signal.setitimer(signal.ITIMER_REAL, 60)
                following = items[place + 1] if place + 1 < len(items) else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            _leave(self.failed)

        if not tests:
            mutant.state = "not reached"
            return
        begin = time.perf_counter()
        answer = _forked(run)
        mutant.seconds = round(time.perf_counter() - begin, 2)
        mutant.by = eval(answer) if answer else []
        mutant.state = "out of time" if answer is None else "killed" if mutant.by else "survived"


def _next(items: list[pytest.Item], item: pytest.Item) -> pytest.Item | None:
    place = items.index(item) + 1
    return items[place] if place < len(items) else None


_answer = -1


def _leave(answer: object) -> None:
    """End a forked process with an answer."""
    with os.fdopen(_answer, "w") as file:
        file.write(repr(answer))
    os._exit(0)


def _forked(run: Any) -> str | None:
    """Run in a forked process, silently; return what it leaves with, or None if a signal ended it."""
    global _answer
    read, _answer = os.pipe()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        os.close(read)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            run()
        except BaseException as error:  # noqa: BLE001 - a mutant may raise anything, SystemExit too
            _leave([f"not a test: {type(error).__name__}: {error}"])
        os._exit(1)
    os.close(_answer)
    with os.fdopen(read) as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else answer


def load(path: Path) -> list[Mutant]:
    """Read the mutants of a file."""
    return [Mutant(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def print_table(files: list[Path]) -> None:
    """Print how many mutants of each module were killed, and those that were not."""
    runs = [load(file) for file in files]
    states = ("killed", "out of time", "survived", "not reached")
    print("| module | tried |" + "".join(f" {state} |" for _ in runs for state in states))
    print("|---|---|" + "---|" * len(states) * len(runs))
    modules = {mutant.name: mutant.module for mutant in runs[0]}
    for module in [*sorted(set(modules.values())), "all"]:
        here = [[m for m in run if module in ("all", modules[m.name])] for run in runs]
        cells = [str(sum(m.state == state for m in run)) for run in here for state in states]
        print(f"| {module} | {len(here[0])} | " + " | ".join(cells) + " |")
    noticed = {m.name: m for m in runs[0] if m.state in states[:2]} if len(runs) == 2 else {}
    for mutant in runs[-1]:
        if mutant.state in states[2:] and (len(runs) == 1 or mutant.name in noticed):
            print(f"\n{mutant.module} {mutant.function}: {mutant.state}\n{mutant.diff}")
            if mutant.name in noticed:
                print("  noticed by", ", ".join(noticed[mutant.name].by) or "a test that is out of time")


def main() -> None:
    """Try the mutants, or print the table of some that were tried."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tier", choices=TIERS, default="default")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--only", type=Path)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--also", nargs="+", default=[])
    parser.add_argument("--longest", type=float, default=30.0, help="seconds of a test that is still run for mutants")
    parser.add_argument("--table", type=Path, nargs="+")
    options = parser.parse_args()
    if options.table:
        print_table(options.table)
        return
    os.chdir(ROOT)
    mutants = draw(options.number, only={mutant.name for mutant in load(options.only)} if options.only else ())
    trial = Trial(mutants, out=options.out.absolute(), every=options.every, longest=options.longest)
    options.out.unlink(missing_ok=True)
    common = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0", "-m", TIERS[options.tier]]
    sys.exit(pytest.main([*common, *CONFIG["pytest_add_cli_args_test_selection"], *options.also], plugins=[trial]))


if __name__ == "__main__":
    main()
