"""The endpoint, met by the SDKs of OpenAI and Anthropic and by bare requests."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from agentrl.endpoint.call import Asked, RefusalKind, RefusedError, Report, Said
from agentrl.endpoint.server import Endpoint, Session
from agentrl.errors import ConfigError
from tests.support.each import each

openai: Any = pytest.importorskip("openai", reason="comes with the extra of vLLM")
anthropic: Any = pytest.importorskip("anthropic", reason="comes with the extra of vLLM")

USER: Any = [{"role": "user", "content": "2 + 2?"}]
BODY = {"model": "policy", "messages": USER, "max_tokens": 9}
LONG_S = 60.0


class Policy:
    """A policy that says "four", once it may."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.asked: list[Asked] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = threading.Event()
        self.refusal: Exception | None = None
        self.delay_s = 0.0
        if is_open:
            self.may_end.set()

    async def answer(self, asked: Asked) -> Said:
        number = len(self.asked)
        self.asked.append(asked)
        self.has_begun.set()
        await asyncio.sleep(self.delay_s)
        await asyncio.to_thread(self.may_end.wait, LONG_S)
        self.has_ended.set()
        if self.refusal:
            raise self.refusal
        message = {"role": "assistant", "content": f"four {number}"}
        return Said(number=number, message=message, prompt_tokens=5, completion_tokens=2)


async def count(asked: Asked) -> int:
    return len(asked.messages[0]["content"])


def gpt(session: Session, **options: Any) -> Any:
    return openai.OpenAI(**{"base_url": session.base_url, "api_key": session.api_key, "max_retries": 9} | options)


def claude(session: Session, **options: Any) -> Any:
    return anthropic.Anthropic(
        **{"base_url": session.anthropic_url, "api_key": session.api_key, "max_retries": 9} | options
    )


def chat(client: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=USER).choices[0].message.content


def chat_stream(client: Any) -> str:
    chunks = client.chat.completions.create(model="policy", messages=USER, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def respond(client: Any) -> Any:
    return client.responses.create(model="policy", input="2 + 2?").output_text


def respond_stream(client: Any) -> str:
    events = client.responses.create(model="policy", input="2 + 2?", stream=True)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def message(client: Any) -> Any:
    return client.messages.create(model="policy", messages=USER, max_tokens=9).content[0].text


def message_stream(client: Any) -> Any:
    with client.messages.stream(model="policy", messages=USER, max_tokens=9) as stream:
        return stream.get_final_text()


CALLS: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = [
    (gpt, chat),
    (gpt, chat_stream),
    (gpt, respond),
    (gpt, respond_stream),
    (claude, message),
    (claude, message_stream),
]


def test_each_dialect_is_answered_whole_and_as_a_stream() -> None:
    policy = Policy()
    with Endpoint(["policy"]) as endpoint:
        session = endpoint.open_session(policy.answer)
        answers = [call(client(session)) for client, call in CALLS]
        assert endpoint.close_session(session) == []
    assert answers == [f"four {number}" for number in range(6)]
    assert [asked.form.stream for asked in policy.asked] == [False, True] * 3
    assert all([message["content"] for message in asked.messages] == ["2 + 2?"] for asked in policy.asked)


def test_heartbeats_keep_clients_whose_read_timeout_is_shorter_than_a_call() -> None:
    policy = Policy()
    policy.delay_s = 3
    with Endpoint(["policy"], heartbeat_s=0.3) as endpoint, ThreadPoolExecutor(6) as pool:
        session = endpoint.open_session(policy.answer)
        answers = [pool.submit(call, client(session, timeout=1)) for client, call in CALLS]
        assert sorted(str(each.result()) for each in answers) == [f"four {number}" for number in range(6)]
    assert len(policy.asked) == 6


@pytest.mark.slow
@each("call", [CALLS[0], CALLS[4]])
def test_a_call_that_a_client_sends_again_after_its_read_timeout_is_sampled_once(call: Any) -> None:
    policy = Policy(is_open=False)
    client, ask = call
    with Endpoint(["policy"], heartbeat_s=LONG_S) as endpoint:
        session = endpoint.open_session(policy.answer)
        impatient = client(session, timeout=0.5)
        send = impatient._client.send
        sent: list[Any] = []

        def count_sent(*args: Any, **kwargs: Any) -> Any:
            sent.append(args)
            if len(sent) == 2:
                threading.Timer(0.1, policy.may_end.set).start()
            return send(*args, **kwargs)

        impatient._client.send = count_sent
        assert ask(impatient) == "four 0"
        assert endpoint.close_session(session) == []
    assert len(sent) >= 2
    assert len(policy.asked) == 1


def post(session: Session, **options: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {session.api_key}"} | options.pop("headers", {})
    return httpx2.post(f"{session.base_url}/chat/completions", json=BODY | options, headers=headers, timeout=LONG_S)


def test_a_refusal_after_a_heartbeat_cuts_the_connection_and_is_given_to_the_next_try() -> None:
    policy = Policy(is_open=False)
    policy.refusal = RefusedError(RefusalKind.FAILED, "broken")
    with Endpoint(["policy"], heartbeat_s=0.05) as endpoint:
        session = endpoint.open_session(policy.answer)
        url, headers = f"{session.base_url}/chat/completions", {"x-api-key": session.api_key}
        with httpx2.stream("POST", url, json=BODY, headers=headers, timeout=LONG_S) as response:
            assert response.status_code == 200
            pieces = response.iter_raw()
            assert next(pieces).strip() == b""
            policy.may_end.set()
            with pytest.raises(httpx2.RemoteProtocolError):
                list(pieces)
        again = post(session)
    assert (again.status_code, again.headers["x-should-retry"]) == (400, "false")
    assert again.json()["error"]["code"] == "engine_failed"
    assert len(policy.asked) == 1


def test_a_refusal_in_a_stream_that_has_begun_is_an_event() -> None:
    policy = Policy(is_open=False)
    policy.refusal = RefusedError(RefusalKind.TOO_LONG, "prompt is too long")
    with Endpoint(["policy"], heartbeat_s=0.05) as endpoint:
        session = endpoint.open_session(policy.answer)
        body = BODY | {"stream": True}
        with httpx2.stream("POST", f"{session.base_url}/messages", json=body, timeout=LONG_S) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            policy.may_end.set()
            assert "event: error" in list(lines)


def test_an_answer_that_raises_what_nobody_expects_is_a_refusal_that_no_sdk_retries() -> None:
    policy = Policy()
    policy.refusal = ZeroDivisionError()
    with Endpoint(["policy"]) as endpoint:
        session = endpoint.open_session(policy.answer)
        with pytest.raises(openai.BadRequestError, match="the engine failed"):
            chat(gpt(session))
    assert len(policy.asked) == 1


def test_a_call_whose_client_has_left_is_told_at_the_end_and_handed_out_before() -> None:
    policy = Policy(is_open=False)
    with Endpoint(["policy"], heartbeat_s=0.05) as endpoint:
        session = endpoint.open_session(policy.answer)
        with httpx2.stream("POST", f"{session.base_url}/chat/completions", json=BODY, timeout=LONG_S) as response:
            next(response.iter_raw())
        httpx2.head(session.anthropic_url, timeout=LONG_S)  # the server has seen the end of the connection by then
        policy.may_end.set()
        assert policy.has_ended.wait(LONG_S)
        other = endpoint.open_session(policy.answer)
        assert post(other).status_code == 200
        assert post(session).json()["id"] == "chatcmpl-0"
        assert post(session).json()["id"] == "chatcmpl-2"  # equal and not marked: another sample
        assert endpoint.close_session(session) == endpoint.close_session(other) == []


def test_numbers_of_undelivered_calls_are_returned_by_close() -> None:
    policy = Policy(is_open=False)
    with Endpoint(["policy"], heartbeat_s=0.05) as endpoint:
        session = endpoint.open_session(policy.answer)
        with httpx2.stream("POST", f"{session.base_url}/chat/completions", json=BODY, timeout=LONG_S) as response:
            next(response.iter_raw())
        httpx2.head(session.anthropic_url, timeout=LONG_S)
        policy.may_end.set()
        assert policy.has_ended.wait(LONG_S)
        assert endpoint.close_session(session) == [0]


def test_a_waiting_client_of_a_closed_session_is_refused() -> None:
    policy = Policy(is_open=False)
    with Endpoint(["policy"]) as endpoint, ThreadPoolExecutor(1) as pool:
        session = endpoint.open_session(policy.answer)
        waiting = pool.submit(chat, gpt(session))
        assert policy.has_begun.wait(LONG_S)
        assert endpoint.close_session(session) == []
        with pytest.raises(openai.APIStatusError) as caught:
            waiting.result()
        assert caught.value.status_code == 410
        with pytest.raises(openai.AuthenticationError):
            chat(gpt(session))
        policy.may_end.set()
    assert len(policy.asked) == 1


def test_a_key_without_a_path_and_a_path_without_a_key_suffice() -> None:
    policy = Policy()
    with Endpoint(["policy"]) as endpoint:
        session = endpoint.open_session(policy.answer)
        root = session.base_url.partition("/s/")[0]
        assert chat(gpt(session, base_url=f"{root}/v1")) == "four 0"
        assert message(claude(session, base_url=root)) == "four 1"
        assert httpx2.post(f"{session.base_url}/chat/completions", json=BODY, timeout=LONG_S).status_code == 200


def test_a_wrong_key_is_refused_in_the_form_of_the_dialect() -> None:
    policy = Policy()
    with Endpoint(["policy"]) as endpoint:
        session, other = endpoint.open_session(policy.answer), endpoint.open_session(policy.answer)
        root = session.base_url.partition("/s/")[0]
        for wrong in ({"api_key": other.api_key}, {"base_url": f"{root}/v1", "api_key": "x"}):
            with pytest.raises(openai.AuthenticationError) as refused:
                chat(gpt(session, **wrong))
            assert refused.value.code == "invalid_api_key"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            message(claude(session, api_key=other.api_key))
        assert caught.value.body["error"]["type"] == "authentication_error"
        assert post(session, headers={"x-api-key": other.api_key}).status_code == 401
        assert httpx2.post(f"{root}/v1/chat/completions", json=BODY, timeout=LONG_S).status_code == 401
    assert policy.asked == []


def test_bodies_and_headers_are_bounded() -> None:
    policy = Policy()
    with Endpoint(["policy"], max_body_bytes=100_000) as endpoint:
        session = endpoint.open_session(policy.answer)
        with pytest.raises(openai.APIStatusError) as caught:
            gpt(session).chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 9_000_000}])
        assert caught.value.status_code == 413
        with pytest.raises(anthropic.APIStatusError) as too_large:
            claude(session).messages.create(model="x" * 200_000, messages=USER, max_tokens=9)
        assert too_large.value.status_code == 413
        assert post(session, headers={"x": "y" * 20_000}).status_code == 431
        with suppress(httpx2.TransportError):  # the connection is closed while the client sends
            assert post(session, headers={"x": "y" * 200_000}).status_code == 400
        assert chat(gpt(session)) == "four 0"


def test_images_are_refused() -> None:
    policy = Policy()
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    with Endpoint(["policy"]) as endpoint:
        session = endpoint.open_session(policy.answer)
        with pytest.raises(openai.BadRequestError, match="image_url") as caught:
            gpt(session).chat.completions.create(model="policy", messages=image)
        assert caught.value.response.headers["x-should-retry"] == "false"
    assert policy.asked == []


def test_each_of_n_samples_is_a_call() -> None:
    policy = Policy()
    with Endpoint(["policy"]) as endpoint:
        session = endpoint.open_session(policy.answer)
        choices = gpt(session).chat.completions.create(model="policy", messages=USER, n=3).choices
    assert [choice.message.content for choice in choices] == ["four 0", "four 1", "four 2"]
    assert len(policy.asked) == 3


def test_models_are_listed_tokens_counted_and_signs_of_life_given() -> None:
    policy = Policy()
    with Endpoint(["policy", "planner"]) as endpoint:
        session = endpoint.open_session(policy.answer, count=count)
        assert [each.id for each in gpt(session).models.list()] == ["policy", "planner"]
        assert [each.id for each in claude(session).models.list()] == ["policy", "planner"]
        assert gpt(session).models.retrieve("a/b").id == "a/b"
        assert claude(session).messages.count_tokens(model="policy", messages=USER).input_tokens == 6
        with pytest.raises(anthropic.NotFoundError):
            claude(endpoint.open_session(policy.answer)).messages.count_tokens(model="policy", messages=USER)
        root = session.base_url.partition("/s/")[0]
        for url in (f"{root}/", session.anthropic_url, f"{session.anthropic_url}/"):
            assert httpx2.head(url, timeout=LONG_S).status_code == 200
        missing = httpx2.get(f"{root}/v1/files", timeout=LONG_S)
        assert (missing.status_code, missing.headers["x-should-retry"]) == (404, "false")
        assert "base URL" in json.loads(missing.content)["error"]["message"]


def test_an_endpoint_listens_on_loopback_unless_another_host_is_named() -> None:
    with Endpoint([]) as endpoint:
        assert endpoint.open_session(Policy().answer).base_url.startswith("http://127.0.0.1:")
        port = endpoint._socket.getsockname()[1]
        assert endpoint._socket.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            Endpoint([], port=port)
    with Endpoint([], host="0.0.0.0", public_host="trainer") as endpoint:
        assert endpoint.open_session(Policy().answer).base_url.startswith("http://trainer:")


def test_packets_of_an_answer_do_not_wait_for_acknowledgements() -> None:
    with Endpoint([]) as endpoint, socket.create_connection(endpoint._socket.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(9) == b"HTTP/1.1 "
        (connection,) = endpoint._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_reports_rewards_and_states_for_its_own_session() -> None:
    reports: list[Report] = []

    def take(report: Report) -> None:
        if report.call == "chatcmpl-9":
            raise RefusedError(RefusalKind.INVALID, "no answer has this id")
        reports.append(report)

    with Endpoint(["policy"]) as endpoint:
        session = endpoint.open_session(Policy().answer, report=take)
        silent = endpoint.open_session(Policy().answer)

        def post(kind: str, body: Any, key: str = session.api_key) -> int:
            headers = {"authorization": f"Bearer {key}"}
            url = f"{endpoint._url}/v1/agentrl/{kind}"
            return httpx2.post(url, json=body, headers=headers, timeout=LONG_S).status_code

        assert post("reward", {"reward": 1}) == 200
        assert post("reward", {"reward": 0.5, "call": "chatcmpl-0"}) == 200
        assert post("state", {"state": "begin"}) == 200
        for kind, body in (
            ("reward", {"reward": "much"}),
            ("reward", {"reward": 1, "call": "chatcmpl-9"}),
            ("reward", {"rewards": 1}),
            ("state", {"state": 3}),
            ("state", [1]),
        ):
            assert post(kind, body) == 400
        assert post("reward", {"reward": 1}, silent.api_key) == 400
        assert post("reward", {"reward": 1}, "another") == 401
    assert reports == [Report(reward=1.0), Report(reward=0.5, call="chatcmpl-0"), Report(state="begin")]
