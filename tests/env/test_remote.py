"""Environments hosted elsewhere are those that are hosted here, whatever becomes of their servers."""

import asyncio
import json
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import serve

from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.cli import main
from agentrl.env import base_env, describe, tool_call
from agentrl.env.make import EnvConfig
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.recipe.config import load_recipe
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks, env_server
from agentrl.rollout.demonstrations import demonstrations
from agentrl.testing import ScriptedEngine
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason, Trajectory
from tests.support.each import each
from tests.support.hosted import ODD, loads, pids, serving
from tests.support.processes import Command, is_alive
from tests.support.threads import wait_until

pytestmark = pytest.mark.process

DRAWS: list[Message] = [tool_call("draw"), tool_call("draw", times=2), {"role": "assistant", "content": "hm"}]
FAILS: list[Message] = [
    tool_call("draw", times="many"),
    tool_call("break_off"),
    {"role": "assistant", "content": "break"},
]
KEY_DOOR: list[Message] = [*(tool_call("open_box", box=box) for box in range(3)), tool_call("open_door")]
CONFIG = RolloutConfig(
    num_groups=3, group_size=4, max_turns=6, max_turn_tokens=512, max_context_tokens=8192, max_episode_tokens=4096,
    max_retries=1, env_timeout_s=20.0,
)  # fmt: skip


class Acting(ScriptedEngine):
    """Says to a prompt one of some messages, always the same one."""

    def __init__(self, renderer: ChatMLRenderer, messages: Sequence[Message]) -> None:
        super().__init__(lambda _, __: [])
        self.num_sampled = 0
        self._said = [tuple(renderer.encode(message)) for message in messages]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        self.num_sampled += 1
        ids = self._said[zlib.crc32(f"{request_id} {prompt_ids}".encode()) % len(self._said)]
        await asyncio.sleep(0)
        rest = (-1.0,) * len(ids), (0,) * len(ids)
        return Completion(token_ids=ids, logprobs=rest[0], versions=rest[1], finish_reason=FinishReason.STOP)


class Played:
    """Groups, and what else came of playing them."""

    def __init__(
        self, make: Callable[[], Any], messages: Sequence[Message], *, fork: bool = False, **config: Any
    ) -> None:
        renderer = ChatMLRenderer(train_tokenizer([], vocab_size=261))
        self.engine = Acting(renderer, messages)
        self.faults: list[Trajectory] = []
        settings = CONFIG.model_copy(update=config)
        context = EpisodeContext(engine=self.engine, renderer=renderer, config=settings)
        pool = RolloutPool(
            player=EnvPlayer(make), context=context, tasks=Tasks(seed=4), fork=fork, on_fault=self.faults.append
        )
        with closing(pool):
            self.groups = asyncio.run(pool.collect())
            self.counts = dict(pool.counts)

    @property
    def episodes(self) -> list[Trajectory]:
        return [timeless(one) for group in self.groups for one in group.trajectories]


def timeless(one: Trajectory) -> Trajectory:
    return replace(one, metrics={name: value for name, value in one.metrics.items() if name != "env_s"})


def remote(config: EnvConfig, *urls: str) -> EnvConfig:
    return config.model_copy(update={"servers": urls})


@pytest.fixture
def odd() -> EnvConfig:
    return EnvConfig(id=ODD)


@pytest.fixture
def url(odd: EnvConfig) -> Iterator[str]:
    with serving(odd) as (_, url):
        yield url


@each("fork", [False, True])
def test_episodes_elsewhere_equal_those_played_here_to_the_bit(fork: bool, odd: EnvConfig, url: str) -> None:
    here, there = Played(odd.make, DRAWS, fork=fork), Played(remote(odd, url).make, DRAWS, fork=fork)
    assert there.episodes == here.episodes
    assert there.counts == here.counts
    assert {one.stop_reason for one in here.episodes} == {StopReason.TERMINATED, StopReason.MAX_TURNS}
    assert all(one.env_id == "Odd" and one.metrics["log/begun"] == 1.5 and one.gold_answer for one in there.episodes)
    if fork:
        assert sum(one.metrics["branches"] for one in there.episodes) > 20


def test_an_environment_with_wrappers_a_schedule_and_options_is_hosted_whole() -> None:
    config = EnvConfig(
        id="key_door",
        options={"num_boxes": 3},
        wrappers=({"id": "time_limit", "max_turns": 3},),
        schedule=({"from_step": 2, "options": {"num_boxes": 5}},),
    )
    with serving(config) as (_, url):
        here, there = Played(config.make, KEY_DOOR), Played(remote(config, url).make, KEY_DOOR)
        with closing(base_env(remote(config, url).make(1))) as later:
            begun = [later.reset(seed=seed, options={}) for seed in range(8)]
    assert there.episodes == here.episodes
    assert any(one.truncated for one in there.episodes)
    assert begun == [config.make(1).reset(seed=seed, options={}) for seed in range(8)]
    assert begun != [config.make(0).reset(seed=seed, options={}) for seed in range(8)]


def test_faults_elsewhere_are_described_as_those_here(odd: EnvConfig, url: str) -> None:
    here, there = Played(odd.make, DRAWS + FAILS), Played(remote(odd, url).make, DRAWS + FAILS)

    def known(played: Played) -> list[Trajectory]:
        return sorted(
            map(timeless, played.faults), key=lambda one: (one.trajectory_id, len(one.turns), one.error or "")
        )

    assert known(there) == known(here)
    assert there.episodes == here.episodes
    words = {one.error for one in there.faults}
    assert len(words) == 2
    assert all(one.fault and "hosted.py" in one.fault.traceback for one in there.faults)


def test_what_an_environment_offers_and_its_oracle_are_the_same(odd: EnvConfig, url: str) -> None:
    def played(config: EnvConfig) -> Any:
        renderer = ChatMLRenderer(train_tokenizer([], vocab_size=261))
        playing = demonstrations(config.make, renderer, count=4, skill=0.5, config=CONFIG, tasks=Tasks(seed=2))
        with closing(base_env(config.make())) as env:
            return describe(env), env.turn_rewards, env.can_fork, asyncio.run(playing)

    assert played(remote(odd, url)) == played(odd)


def test_an_environment_that_cannot_be_made_is_refused_by_its_server_at_once() -> None:
    command = Command("env-serve", ODD, "--env.options.refused=true", "--port", "0", "--workers", "1")
    assert "could not be made: LookupError" in command.wait(60)
    assert command.returncode == 2


class Serving:
    """`agentrl env-serve` in a process of its own."""

    def __init__(self, *options: object) -> None:
        self.command = Command("env-serve", ODD, "--port", "0", "--workers", "3", *options)
        wait_until(lambda: "serving at " in self.command.out or self.command.returncode is not None)
        assert self.command.returncode is None, self.command.wait()
        self.url = self.command.out.split("serving at ")[1].split()[0]


def playing_while(act: Callable[[], None], make: Callable[[], Any]) -> Played:
    """Play, and act when some have begun."""
    thread = threading.Timer(0.6, act)
    thread.start()
    try:
        return Played(make, DRAWS)
    finally:
        thread.join()


def test_a_server_that_is_killed_loses_nothing_and_scores_nothing() -> None:
    config = EnvConfig(id=ODD, options={"step_s": 0.1})
    servers = [Serving("--env.options.step_s=0.1") for _ in range(2)]
    here = Played(config.make, DRAWS)
    try:
        make = remote(config, *(server.url for server in servers)).make
        there = playing_while(servers[0].command.kill, make)
    finally:
        for server in servers:
            server.command.kill()
    assert there.episodes == here.episodes
    assert there.counts["faults"] == there.counts["retries"] >= 1
    assert there.counts.get("failed_episodes", 0) == 0
    assert {one.fault.kind for one in there.faults if one.fault} == {f"lost environment server {servers[0].url}"}
    assert there.engine.num_sampled == sum(len(one.turns) for one in there.episodes)  # none was sampled twice


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing_and_another_takes_its_place() -> None:
    config = EnvConfig(id=ODD, options={"step_s": 0.1})
    here = Played(config.make, DRAWS)
    with serving(config, workers=2) as (server, url):
        killed = pids(server)[0]
        there = playing_while(lambda: os.kill(killed, signal.SIGKILL), remote(config, url).make)
        wait_until(lambda: len(pids(server)) == 2)
        assert killed not in pids(server)
    assert there.episodes == here.episodes
    assert there.counts["faults"] >= 1
    assert there.engine.num_sampled == sum(len(one.turns) for one in there.episodes)


def test_an_environment_that_ends_its_worker_every_time_fails_its_episode_alone(odd: EnvConfig) -> None:
    with serving(odd, workers=2) as (_, url), pytest.raises(EnvironmentFailure, match="its worker ended"):
        Played(remote(odd, url).make, [tool_call("die")], max_consecutive_failures=2)


def test_a_call_that_hangs_is_a_fault_as_here_and_ends_its_worker(
    odd: EnvConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_server, "_GRACE_S", 0.1)
    with serving(odd, workers=1) as (server, url):
        before = pids(server)
        play = partial(
            Played, remote(odd, url).make, [tool_call("hang")], num_groups=1, group_size=2, env_timeout_s=0.5
        )
        with pytest.raises(
            EnvironmentFailure, match=r"Odd: step\(\) did not return within rollout.env_timeout_s: 0.5 s"
        ):
            play(max_consecutive_failures=1, max_retries=0)
        wait_until(lambda: len(pids(server)) == 1 and pids(server) != before)
        assert Played(remote(odd, url).make, DRAWS).episodes == Played(odd.make, DRAWS).episodes


def test_sessions_go_where_there_are_fewest_for_each_worker(odd: EnvConfig) -> None:
    with serving(odd, workers=1) as (small, first), serving(odd, workers=3) as (large, second):
        config = remote(odd, first, second)
        envs = [config.make() for _ in range(8)]
        assert loads(small) == [2]
        assert loads(large) == [2, 2, 2]
        for env in envs:
            env.close()
        wait_until(lambda: loads(small) + loads(large) == [0] * 4)


def test_a_recipe_with_a_server_that_does_not_answer_ends_with_its_name_and_status_2(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["envs", "play", ODD, f"--env.servers=[{url},ws://127.0.0.1:9]"])
    assert end.value.code == 2
    assert "env.servers.1: ws://127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_a_server_of_another_environment_is_refused_with_the_field(odd: EnvConfig, url: str) -> None:
    other = EnvConfig(id=ODD, options={"step_s": 1.0}, servers=(url,))
    with pytest.raises(ConfigError, match=r"hosts env.options: dict \{\}, and the recipe has dict \{'step_s': 1.0\}"):
        other.make()


@each("given", ["http://a:1", "ws://a", "a:1", "ws://:1"])
def test_an_address_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^env\.servers: expected ws://HOST:PORT, got "):
        load_recipe({"env": {"servers": [given]}})


def test_only_who_has_the_token_is_let_in(odd: EnvConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(odd, workers=1, token="right") as (_, url):
        with pytest.raises(ConfigError, match="AGENTRL_ENV_TOKEN"):
            remote(odd, url).make()
        monkeypatch.setenv("AGENTRL_ENV_TOKEN", "wrong")
        with pytest.raises(ConfigError, match="refuses the token"):
            remote(odd, url).make()
        monkeypatch.setenv("AGENTRL_ENV_TOKEN", "right")
        remote(odd, url).make().close()


def test_another_host_than_this_machine_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_ENV_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"--host: 0[.]0[.]0[.]0 lets others in"):
        env_server.run(EnvConfig(id=ODD), num_workers=1, host="0.0.0.0", port=0, say=print)


def test_no_page_in_a_browser_is_let_in(url: str) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        connect(url, additional_headers={"Origin": "http://evil.example"})


@each(
    "text",
    [
        *("", "no JSON", "[]", "[" * 100_000, '{"call": "eval"}', '{"call": "reset"}', '{"call": "step", "number": 7}'),
        *('{"call": "make", "stage": 9}', '{"call": "make", "id": "os:system"}', '{"call": "make", "stage": "0"}'),
    ],
)
def test_whatever_a_client_sends_the_server_answers_or_hangs_up_and_serves_on(
    text: str, odd: EnvConfig, url: str
) -> None:
    with connect(url) as client:
        client.recv()
        client.send(text)
        if text:
            assert json.loads(client.recv())["failure"]["words"]
    with closing(base_env(remote(odd, url).make())) as env:
        assert env.reset(seed=1, options={"split": "train", "task_index": 0})


@pytest.mark.slow
@each(
    "said",
    ["no JSON", "[" * 100_000, "{}", '{"value": {"messages": 3}}', '{"value": {"messages": [], "state_key": 1}}'],
)
def test_whatever_a_server_answers_is_data_or_refused(said: str, odd: EnvConfig) -> None:
    """A server that answers everything with the same, once the environment is made."""
    made = {"number": 0, "name": "Odd", "tools": [], "turn_rewards": True, "can_fork": True, "default_action_key": True}

    def answer(client: Any) -> None:
        client.send(json.dumps({"protocol": 1, "env": odd.hosted(), "workers": 1, "sessions": 1}))
        for request in client:
            client.send(json.dumps({"value": made}) if "make" in request else said)

    with serve(answer, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
            with pytest.raises(EnvironmentFailure, match="2 episodes failed in a row"):
                Played(remote(odd, url).make, DRAWS, max_consecutive_failures=2)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@each("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_all_its_workers_however_it_ends(end: signal.Signals, odd: EnvConfig) -> None:
    server = Serving()
    envs = [remote(odd, server.url).make() for _ in range(3)]
    for env in envs:
        env.reset(seed=0, options={"split": "train", "task_index": 0})
    found = [int(str(env.step("pid")[0][0]["content"])) for env in envs]
    assert len(set(found)) == 3
    server.command.send_signal(end)
    server.command.wait(20)
    wait_until(lambda: not any(map(is_alive, found)), timeout_s=20)
