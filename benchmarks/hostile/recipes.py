"""Recipes that cannot be carried out, and a few that look so and can."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.hostile.cases import CaseCounts, agentrl, attempt, contents

TINY: dict[str, Any] = {
    "env": {"id": "key_door"},
    "model": {
        "local": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    },
    "engine": {"name": "transformers"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_turns": 3, "max_turn_tokens": 8, "max_context_tokens": 1024},
    "train": {"steps": 1, "num_minibatches": 2, "device": "cpu", "checkpoint_every": 1},
    "evaluation": {"num_tasks": 2},
    "report": {"rollouts_every": 1},
}
"""A run that takes a second."""

ENV = """
from agentrl import ToolEnv
class Env(ToolEnv):
    def start(self, options): return 'Well?'
    def answer(self, text): self.finish(); return None
"""
INIT = ENV + "    def __init__(self):\n        super().__init__(); self.tools = "
MODULES: dict[str, str | bytes] = {
    "exits": "import sys; sys.exit(3)",
    "quits": "raise SystemExit",
    "kills": "raise KeyboardInterrupt",
    "raises": "1 / 0",
    "raises_dumb": "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
    "lines": "raise ValueError('one\\ntwo\\n\\x1b[31mthree')",
    "recurses": "def f(): f()\nf()",
    "asserts": "assert False",
    "syntax": "def (",
    "nothing": "",
    "not_text": b"\xff\xfe\x00",
    "imports": "import no_such_module_of_anybody",
    "stops": "raise StopIteration",
    "memory": "raise MemoryError",
    "group": "raise BaseExceptionGroup('both', [SystemExit(1)])",
    "env": ENV,
    "number": "Env = 3",
    "function": "def Env(**options): return None",
    "no_env": "class Env: pass",
    "abstract": "from agentrl import ToolEnv\nclass Env(ToolEnv): pass",
    "init_raises": ENV + "    def __init__(self): 1 / 0\n",
    "init_exits": ENV + "    def __init__(self): raise SystemExit(4)\n",
    "init_hangs": "import time\n" + ENV + "    def __init__(self):\n        super().__init__(); time.sleep(10_000)\n",
    "no_super": ENV + "    def __init__(self): pass\n",
    "provides_none": ENV + "    def provides(self): return None\n",
    "provides_raises": ENV + "    def provides(self): raise OSError('no')\n",
    "flat_tools": INIT + "[{'name': 'x', 'parameters': {}}]\n",
    "tools_none": INIT + "None\n",
    "tools_text": INIT + "'open'\n",
    "tools_cyclic": INIT + "(a := {'type': 'function'})\n        a['function'] = a\n",
    "tools_bool": INIT + "[{'type': 'function', 'function': {'name': 'x', "
    "'parameters': {'type': 'object', 'properties': {'y': True}}}}]\n",
    "credit": "from agentrl import CreditScheme\nclass Scheme(CreditScheme):\n    def assign(self, groups): return 3\n",
    "credit_raises": "from agentrl import CreditScheme\nclass Scheme(CreditScheme):\n    def assign(self, groups): 1 / 0\n",
}
"""Modules that lie beside the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe file and how it is called."""

    name: str
    text: str | bytes
    options: tuple[str, ...] = ()
    expected: Literal["refused", "carried out", "either"] = "refused"
    """`carried out`: it looks strange and can be. `either`: strange, and no mistake that must be seen before the run begins."""
    may_begin: bool = False
    """True for what shows only in the first step: there is a folder then."""
    num_mistakes: int = 1
    """Each has a line."""
    run_dir: str = "run"
    files: tuple[str, ...] = field(default=tuple(MODULES))


EITHER = (
    ("rollout.max_live_episodes", "1000000000000"), ("rollout.env_timeout_s", "1e+300"),
    ("rollout.engine_timeout_s", "1e+308"), ("rollout.max_retries", "1000000000000000000000000000000"),
)  # fmt: skip
"""Of `WRONG`: bounds that no machine meets, and that bind nothing."""


def _with(changes: Mapping[str, Any], base: Mapping[str, Any] = TINY) -> dict[str, Any]:
    """Return the tiny recipe with fields, given by their dotted names, set or (`...`) left out."""
    recipe = deepcopy(dict(base))
    for name, value in changes.items():
        *sections, last = name.split(".")
        at = recipe
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return recipe


WRONG: tuple[tuple[str, Any], ...] = (
    ("seed", -1), ("seed", "one"), ("seed", 1.5), ("seed", 2**80), ("seed", None), ("seed", [1]), ("seed", float("nan")),
    ("env", "key_door"), ("env", []), ("env.id", None), ("env.id", 3), ("env.id", ""), ("env.id", ":"), ("env.id", "x:"),
    ("env.id", "key_dor"), ("env.id", "no_such:Env"), ("env.id", "os:no_such"), ("env.id", "CartPole-v1"),
    ("env.id", "agentrl/NoSuch-v0"), ("env.id", "a\x00b:c"), ("env.id", "..env:Env"), ("env.id", "env.:Env"),
    ("env.id", "\ud800:x"), ("env.id", "env:Env.x.y"), ("env.id", "é" * 5000), ("env.id", "subprocess:run"),
    ("env.id", "builtins:eval"), ("env.id", "builtins:print"), ("env.id", "os:_exit"), ("env.id", "sys:exit"),
    ("env.options", "few"), ("env.options", [1]), ("env.options", {"boxs": 3}), ("env.options", {3: 4}),
    ("env.options", {"a": float("nan")}),
    ("env.optons", {}), ("chat.renderer", "none"), ("model.local.hidden_size", 15), ("model.local.num_heads", 0),
    ("model.local.vocab_size", 10), ("model.local", None), ("model.name_or_path", "/no/such/folder"),
    ("model.name_or_path", "run"), ("model.name_or_path", "/etc"), ("model.name_or_path", ""),
    ("model.lora", {"rank": -1}),
    ("warmup.steps", -1), ("warmup.skill", 2), ("warmup.skill", float("inf")), ("engine.name", "llama"),
    ("engine.server.url", "ftp://x"), ("engine.server.url", []), ("engine.server.url", "http://[::1"),
    ("rollout.mode", "later"), ("rollout.group_size", 0), ("rollout.group_size", 1e20), ("rollout.group_size", 10**400),
    ("rollout.group_size", True), ("rollout.num_groups", 10**30), ("rollout.num_groups", "two"),
    ("rollout.temperature", 0),
    ("rollout.temperature", float("nan")), ("rollout.temperature", float("inf")), ("rollout.top_p", 0.5),
    ("rollout.max_turn_tokens", 4096), ("rollout.max_context_tokens", 10), ("rollout.max_context_tokens", 10**9),
    ("rollout.max_live_episodes", 10**12), ("rollout.stale", "mask"), ("rollout.env_timeout_s", -1),
    ("rollout.env_timeout_s", 1e300), ("rollout.engine_timeout_s", 1e308), ("rollout.max_retries", 10**30),
    ("rollout.branches", 3), ("credit", "uniform"), ("credit", {}), ("credit", []), ("credit.scheme", "unifrom"),
    ("credit.scheme", None), ("credit.scheme", "os:system"), ("credit.scheme", "no_such:Scheme"),
    ("credit.scheme", "env:Env"),
    ("credit.scheme", "raises:Scheme"), ("credit.scheme", "exits:Scheme"), ("credit.scheme", "builtins:exec"),
    ("credit.gama", 1), ("credit", {"scheme": "gigpo", "step_weight": "much"}),
    ("credit", {"scheme": "uniform", "fallback": "x"}),
    ("credit", {"scheme": "turn_return", "gamma": float("nan")}),
    ("credit", {"scheme": "judge"}), ("credit", {"scheme": "distill"}),
    ("signals.judge", 3),
    ("loss.unit", "word"), ("loss.clip_low", -1), ("loss.kl_coefficient", float("nan")), ("loss.kl_coefficient", -1),
    ("train.steps", 0), ("train.steps", "1e3x"), ("train.num_minibatches", 64), ("train.learning_rate", 0),
    ("train.learning_rate", "fast"), ("train.learning_rate", float("inf")), ("train.betas", [0.9]),
    ("train.betas", [0.9, 3]),
    ("train.precision", "int1"), ("train.device", "cuda:99"), ("train.optimizer", "sgd"), ("train.keep_last", 0),
    ("train.process_timeout_s", 1e300), ("evaluation.num_tasks", -3), ("evaluation.samples", 0), ("evaluation", None),
    ("report.trackers", ["nobody"]), ("report.trackers", 3), ("report.rollouts_every", -1), ("rollot", {}),
    ("rollout", 3),
    ("rollout", None),
)  # fmt: skip


WHOLE = yaml.safe_dump(TINY)
FILES: dict[str, str | bytes] = {
    "empty": "",
    "only a comment": "# nothing",
    "a list": "- 1",
    "a word": "calculator",
    "a number": "3",
    "null": "null",
    "no YAML": "a: [1, 2",
    "tabs": "env:\n\tid: x",
    "a tag of Python": "!!python/object/apply:os.system ['touch run-was-here']",
    "bytes": b"\xff\xfe\x00\x01",
    "nul": b"seed: 1\x00",
    "twice": WHOLE + "seed: 1\nseed: 2\n",
    "two documents": WHOLE + "---\nseed: 1\n",
    "nested lists": "env: " + "[" * 3000 + "]" * 3000,
    "nested maps": "env: {options: " + "{a: " * 3000 + "1" + "}" * 3001,
    "nested blocks": "\n".join(" " * i + "a:" for i in range(3000)),
    "itself": "&a\nenv: *a",
    "options itself": "env:\n  id: key_door\n  options: &a\n    x: *a",
    "credit itself": "credit: &a\n  scheme: uniform\n  then: *a",
    "an unhashable key": "? [a, b]\n: c",
    "a key that is a number": "1: 2",
    "null key": "null: 2",
    "a bomb": "credit:\n  scheme: uniform\n  a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"  {chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
    "huge int": "seed: " + "9" * 5000,
    "a date": "seed: 2026-11-22",
    "inf": "train: {learning_rate: .inf}",
    "nan": "train: {learning_rate: .nan}",
    "a merge": "<<: 3",
    "a set": "!!set {env}",
    "CR": "seed: 1\r seed: 2",
}
"""What a recipe file may hold."""
COMMAND_LINES: dict[str, tuple[str, ...]] = {
    "unknown": ("--rollout.group_sise", "4"),
    "no value": ("--seed",),
    "two values": ("--seed", "1", "2"),
    "no dashes": ("seed=1",),
    "one dash": ("-seed", "1"),
    "empty name": ("--", "1"),
    "only dots": ("--.", "1"),
    "deep": ("--env.options." + "a." * 3000 + "a", "1"),
    "broken JSON": ("--env", "{"),
    "env.options YAML": ("--env.options.boxes", "[1"),
    "number": ("--rollout.group_size", "1e20"),
    "nan": ("--train.learning_rate", "nan"),
    "inf": ("--train.learning_rate", "1e999"),
    "NaN option": ("--credit.gamma", ".nan"),
    "empty": ("--run_dir", ""),
    "nul": ("--env.id", "a\x00b"),
    "surrogate": ("--env.id", "\udcff"),
    "twice": ("--seed", "1", "--seed", "x"),
    "options": ("--env.options", "3"),
    "credit": ("--credit", "[1]"),
    "a deep JSON": ("--env.options", "[" * 3000 + "]" * 3000),
    "a deep YAML": ("--env.options.x", "[" * 3000 + "]" * 3000),
}
"""Overrides of a recipe that is whole."""


def recipes() -> Iterator[Recipe]:
    """Yield all of them."""
    for name, value in WRONG:
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:30]}..."
        may_do = (name, shown) in EITHER
        yield Recipe(
            name=f"{name}: {shown}",
            text=yaml.safe_dump(_with({name: value})),
            expected="either" if may_do else "refused",
        )
    judge = {"credit": {"scheme": "judge"}}
    for target in ("os:system", "no_such:judge", "env:Env", "builtins:print", "judge"):
        yield Recipe(
            name=f"judge: {target}", text=yaml.safe_dump(_with({**judge, "signals.judge": target})), may_begin=True
        )
    teacher = {"credit": {"scheme": "distill"}, "signals.teacher": "/no/such"}
    yield Recipe(name="a teacher that is nowhere", text=yaml.safe_dump(_with(teacher)))
    for module in MODULES:
        if module not in ("env", "credit", "credit_raises"):
            timeout = {"rollout.env_timeout_s": 1.0}
            may_do = module in ("no_super", "tools_none", "tools_bool")
            text = yaml.safe_dump(_with({"env.id": f"{module}:Env", **timeout}))
            yield Recipe(name=f"env.id: {module}:Env", text=text, expected="either" if may_do else "refused")
    for module in ("exits", "quits", "raises", "syntax", "nothing", "recurses"):
        yield Recipe(
            name=f"credit: {module}:Scheme", text=yaml.safe_dump(_with({"credit": {"scheme": f"{module}:Scheme"}}))
        )
        yield Recipe(
            name=f"judge: {module}:judge", text=yaml.safe_dump(_with({**judge, "signals.judge": f"{module}:judge"}))
        )
    for target in ("os:system", "os:remove", "subprocess:call", "builtins:open"):
        options = {"command": "touch run-was-here", "path": "victim", "args": "touch run-was-here", "file": "victim"}
        for option, value in options.items():
            yield Recipe(
                name=f"{target}({option})",
                text=yaml.safe_dump(_with({"env.id": target, "env.options": {option: value}})),
            )
    yield Recipe(name="an environment that opens a file", text=yaml.safe_dump(_with({"env.id": "pathlib:Path"})))
    for name, source in FILES.items():
        yield Recipe(name=f"file: {name}", text=source)
    for name, overrides in COMMAND_LINES.items():
        yield Recipe(name=f"command line: {name}", text=WHOLE, options=overrides)
    for run_dir in (
        "/proc/x",
        "/proc/1/x",
        "/dev/null",
        "/dev/null/x",
        "recipe.yaml",
        "recipe.yaml/x",
        "/sys/x",
        "a\x00b",
        "x" * 300,
        "x/" * 3000 + "x",
    ):
        yield Recipe(name=f"run_dir: {run_dir[:30]!r}", text=WHOLE, run_dir=run_dir)
    yield Recipe(
        name="run_dir of a user that is nobody", text=WHOLE, run_dir="~nobody-of-this-name/runs", expected="either"
    )
    yield Recipe(
        name="valid: 1e-3 as a learning rate",
        text=WHOLE.replace("steps: 1", "steps: 1\n  learning_rate: 1e-3"),
        expected="carried out",
    )
    yield Recipe(name="valid: a byte order mark", text=b"\xef\xbb\xbf" + WHOLE.encode(), expected="carried out")
    yield Recipe(
        name="valid: an integer of a float",
        text=yaml.safe_dump(_with({"train.learning_rate": 1})),
        expected="carried out",
    )
    yield Recipe(
        name="valid: an env beside the recipe",
        text=yaml.safe_dump(_with({"env.id": "env:Env"})),
        expected="carried out",
    )
    yield Recipe(name="valid: a name with umlauts", text=WHOLE, run_dir="läufe/ß ü", expected="carried out")


def try_recipes(folder: Path, every: int) -> CaseCounts:
    """Train each recipe: one that cannot be carried out is refused in one line and leaves nothing behind."""
    tally = CaseCounts("a malformed recipe, or a module of its that exits, raises or hangs")
    for number, recipe in enumerate(recipes()):
        if number % every:
            continue
        here = folder / f"recipe-{number}"
        here.mkdir(parents=True)
        (here / "recipe.yaml").write_bytes(recipe.text if isinstance(recipe.text, bytes) else recipe.text.encode())
        (here / "victim").write_text("still here")
        for module in recipe.files:
            source = MODULES[module]
            (here / f"{module}.py").write_bytes(source if isinstance(source, bytes) else source.encode())
        before = contents(here)
        ended = attempt(agentrl("train", "recipe.yaml", "--run_dir", recipe.run_dir, *recipe.options), folder=here)
        if recipe.expected == "carried out" or (recipe.expected == "either" and ended.status == 0):
            wrong = ended.harm() or (f"refused: {' / '.join(ended.lines)[:300]}" if ended.status else None)
        else:
            wrong = ended.refusal(num_lines=recipe.num_mistakes)
            if not wrong and not recipe.may_begin and (changed := sorted(contents(here).items() ^ before.items())):
                wrong = f"left or changed {', '.join(sorted({name for name, _ in changed}))[:200]}"
        tally.add(recipe.name, "refused in one line" if ended.status else "carried out", wrong=wrong)
    return tally
