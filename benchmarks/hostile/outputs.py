"""What models write: broken markup, deep and huge arguments, noise; played through environments with tools."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl import ToolEnv, tool
from agentrl.chat import ChatMLRenderer, TemplateRenderer, train_tokenizer
from agentrl.credit import load_credit
from agentrl.env import make_env
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records, records
from agentrl.report.terminal import Console, render
from agentrl.rollout import EnvPlayer, EpisodeContext, Journal, RolloutConfig, RolloutPool, Tasks
from agentrl.testing import ScriptedEngine
from agentrl.types import StopReason
from benchmarks.hostile.cases import CaseCounts, attempt

NUM_SOUPS = 400
BATCH = 50
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


class Workshop(ToolEnv):
    """Tools of every kind: typed, untyped, coroutines, raising, returning what is no text."""

    tool_timeout_s = 0.2

    def start(self, options: dict[str, Any]) -> str:
        return "Use the tools."

    def answer(self, text: str) -> str:
        return text[:1000]

    @tool
    def echo(self, value: Any) -> Any:
        """Return what it is given."""
        return value

    @tool
    def typed(self, number: int, names: list[str] | None = None, table: dict[str, list[int]] | None = None) -> str:
        """Take structured arguments."""
        return f"{number + 1} {names} {table}"

    @tool
    async def wait(self, seconds: float = 0.0) -> str:
        """Wait."""
        await asyncio.sleep(min(seconds, 1))
        return "done"

    @tool
    def fail(self, words: str = "") -> str:
        """Raise."""
        raise ValueError(words)

    @tool
    def bare(self) -> object:
        """Return an object."""
        return object()


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _nested(depth: int, left: str = "[", right: str = "]", middle: str = "") -> str:
    return left * depth + middle + right * depth


VALUES = (
    "{}",
    "[]",
    "null",
    "3",
    '"text"',
    '{"value": 1}',
    '{"number": 1}',
    '{"number": "1"}',
    '{"number": 1.5}',
    '{"number": true}',
    '{"number": 1e400}',
    '{"number": NaN}',
    '{"number": -Infinity}',
    '{"number": ' + "9" * 400 + "}",
    '{"number": ' + "9" * 5000 + "}",
    '{"value": "\\ud800"}',
    '{"value": "\\u0000\\u001b[2J"}',
    '{"value": "</tool_call>"}',
    '{"value": "</think>"}',
    '{"value": "<think>"}',
    '{"value": "<|im_end|>"}',
    '{"value": 1, "value": 2}',
    '{"": 1}',
    '{"self": 1}',
    '{"name": "x"}',
    '{"__class__": 1}',
    '{"seconds": 1}',
    '{"seconds": 1e308}',
    '{"words": "' + "x" * 5000 + '"}',
    '{"number": 1, "names": ["a", 2]}',
    '{"number": 1, "table": {"a": ["x"]}}',
    '{"value": ' + _nested(60) + "}",
    '{"value": ' + _nested(300) + "}",
    '{"value": ' + _nested(3000) + "}",
    '{"value": ' + _nested(300, '{"a":', "}", "1") + "}",
    '{"value": ' + _nested(250) + "}",
    '{"value": 0.1',
    '{"value": }',
    "{'value': 1}",
    '{"value": "é\\n\\t"}',
    '{"expression": "1/0"}',
    '{"expression": "9**9**9"}',
    "{\"expression\": \"__import__('os').system('true')\"}",
    '{"expression": "' + "(" * 500 + '"}',
)
NAMES = (
    "echo",
    "typed",
    "wait",
    "fail",
    "bare",
    "calculate",
    "calc",
    "submit",
    "answer",
    "",
    "start",
    "reset",
    "__init__",
    "step",
    "é",
    "\\ud800",
    "x" * 300,
)
FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|im_start|>",
    "<|im_end|>",
    "{",
    "}",
    "[",
    '"',
    "null",
    "\n",
    "\0",
    "\x1b[31m",
    "\u2028",
    "é",
    "\U0001f600",
    "I think",
    '{"name": ',
    '"arguments": ',
    "```json",
    "<tools>",
    "<function=echo>",
    "assistant\n",
    "{{ 7 * 7 }}",
    "{% raw %}",
)


def soups(count: int) -> Iterator[str]:
    """Yield every name with every value, then as many mixtures as asked for."""
    for name in NAMES:
        for value in VALUES:
            yield _call(name, value)
    rng = random.Random(0)
    for _ in range(count):
        parts = (
            rng.choice(FRAGMENTS) if rng.random() < 0.6 else _call(rng.choice(NAMES), rng.choice(VALUES))
            for _ in range(rng.randint(1, 8))
        )
        yield "".join(parts)


def play(texts: Sequence[str], folder: Path, env: str, *, with_template: bool) -> None:
    """Let a policy say these texts, one an episode, and again at its next turn; write, read back and show all of it."""
    tokenizer = train_tokenizer([], vocab_size=261)
    if with_template:
        tokenizer.chat_template = TEMPLATE
    chatml = ChatMLRenderer(tokenizer)
    renderer = TemplateRenderer(tokenizer) if with_template else chatml
    actions = [chatml.encode({"role": "assistant", "content": text}) for text in texts]
    rng = random.Random(len(texts))
    actions += [(*(rng.randrange(5, 261) for _ in range(60)), *chatml.stop_token_ids) for _ in texts[::10]]  # no UTF-8

    def script(request_id: str, number: int) -> Sequence[int]:
        return actions[int(request_id.split("#")[0].split("/")[1]) % len(actions)]

    config = RolloutConfig(
        mode="partial",
        num_groups=len(actions),
        group_size=2,
        max_live_episodes=16,
        max_turns=2,
        max_turn_tokens=20_000,
        max_episode_tokens=60_000,
        max_context_tokens=100_000,
        max_retries=0,
        env_timeout_s=60,
        engine_timeout_s=300,
    )
    make = partial(make_env, env)
    engine = ScriptedEngine(script)
    pool = RolloutPool(
        player=EnvPlayer(make),
        context=EpisodeContext(engine=engine, renderer=renderer, config=config),
        tasks=Tasks(seed=0),
        journal=Journal(folder / "journal"),
    )
    pool.state_dict()
    with asyncio.Runner() as runner:
        groups = runner.run(pool.collect())
        runner.run(pool.stop())
    pool.state_dict()
    pool.close()
    failed = [t.error for group in groups for t in group.trajectories if t.stop_reason is StopReason.ENV_ERROR]
    assert not failed, failed[0]
    assert sum(1 for _ in Journal(folder / "journal").read_events(1)) > len(actions)
    run, credits = RunFolder(folder), load_credit({"scheme": "uniform"}).assign(groups)
    pieces = lambda token: str(tokenizer.decode([token]))  # noqa: E731
    run.add_rollouts(1, records(groups, credits, step=1, piece=pieces))
    console = Console(width=100, color_system=None)
    for record in read_records(run.rollouts()[0]):
        with console.capture() as shown:
            console.print(render(record))
        assert not set(shown.get()) & set("\x1b\x07\x9b\0"), f"control characters shown: {shown.get()[:300]!r}"
    (folder / "done.json").write_text(json.dumps({"episodes": sum(len(group.trajectories) for group in groups)}))


def try_outputs(folder: Path, every: int) -> CaseCounts:
    """Play each text in each environment, under each renderer: no fault of the environment's; all can be written and shown."""
    tally = CaseCounts(
        "a text of a model: calls with broken, deep and huge arguments, markup in any order, bytes that are no text"
    )
    texts = list(soups(NUM_SOUPS))[::every]
    for env in ("calculator", "benchmarks.hostile.outputs:Workshop"):
        for with_template in (False, True):
            for first in range(0, len(texts), BATCH):
                here = folder / f"outputs-{env.partition('.')[0]}-{with_template}-{first}"
                batch = texts[first : first + BATCH]
                ended = attempt(partial(play, batch, here, env, with_template=with_template), folder=here)
                tally.outcomes["answered to the model"] += len(batch)
                if wrong := ended.harm():
                    tally.outcomes["answered to the model"] -= 1
                    tally.add(
                        f"{env}, {'template' if with_template else 'chatml'}, texts {first} to {first + BATCH}",
                        "",
                        wrong=wrong,
                    )
    return tally
