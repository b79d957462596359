"""Which requests are one call."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrl.endpoint.requests import Arrival, Request, Requests

PATH = ("tools", "one", "two")


def arrive(requests: Requests, *, is_retry: bool = False, path: tuple[str, ...] = PATH) -> tuple[Arrival, Request]:
    return requests.arrive("digest of " + path[-1], path, is_retry=is_retry)


def test_equal_requests_that_are_not_marked_are_two_samples() -> None:
    requests = Requests()
    (_, one), (arrival, two) = arrive(requests), arrive(requests)
    assert arrival is Arrival.NEW
    assert one is not two


def test_a_marked_retry_joins_the_sample_under_way() -> None:
    requests = Requests()
    _, one = arrive(requests)
    assert arrive(requests, is_retry=True) == (Arrival.JOINED, one)
    assert one.sockets == 2


def test_a_request_whose_socket_is_closed_is_joined_without_a_mark() -> None:
    requests = Requests()
    _, one = arrive(requests)
    one.sockets = 0
    assert arrive(requests) == (Arrival.JOINED, one)


def test_an_answer_that_nobody_got_is_handed_out() -> None:
    requests = Requests()
    _, one = arrive(requests)
    one.is_finished, one.sockets = True, 0
    assert requests.undelivered() == [one]
    assert arrive(requests) == (Arrival.AGAIN, one)
    one.is_delivered, one.sockets = True, 0
    assert requests.undelivered() == []
    assert arrive(requests)[0] is Arrival.NEW


def test_an_answer_that_is_being_written_is_not_handed_out_to_another() -> None:
    requests = Requests()
    _, one = arrive(requests)
    one.is_finished = True
    assert arrive(requests)[0] is Arrival.NEW


def test_a_marked_retry_of_a_delivered_answer_gets_the_same_until_the_client_has_gone_on() -> None:
    requests = Requests()
    _, one = arrive(requests)
    one.is_finished = one.is_delivered = True
    one.sockets = 0
    assert arrive(requests, is_retry=True) == (Arrival.AGAIN, one)
    one.sockets = 0
    arrive(requests, path=(*PATH, "answer", "three"))
    assert one.is_read
    assert arrive(requests, is_retry=True)[0] is Arrival.NEW  # the first sending never arrived here


def test_a_retry_whose_first_sending_never_arrived_is_sampled() -> None:
    assert arrive(Requests(), is_retry=True)[0] is Arrival.NEW


class Client:
    """One call as a client sees it: it sends until it has an answer."""

    def __init__(self) -> None:
        self.sendings: list[Request] = []
        self.answer: Request | None = None


class Calls(RuleBasedStateMachine):
    """Clients that send the same words, lose connections and send again: each has one sample, none is sampled for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = Requests()
        self.clients: list[Client] = []
        self.sampled: list[Request] = []

    def send(self, client: Client, *, is_retry: bool) -> None:
        arrival, request = arrive(self.requests, is_retry=is_retry)
        if arrival is Arrival.NEW:
            self.sampled.append(request)
        client.sendings.append(request)

    @rule()
    @precondition(lambda self: all(client.answer for client in self.clients))
    def begin(self) -> None:
        self.clients.append(Client())
        self.send(self.clients[-1], is_retry=False)

    @rule(is_marked=st.booleans())
    @precondition(lambda self: any(not client.answer for client in self.clients))
    def time_out_and_send_again(self, is_marked: bool) -> None:
        client = next(client for client in self.clients if not client.answer)
        client.sendings[-1].sockets -= 1
        self.send(client, is_retry=is_marked)

    @rule()
    @precondition(lambda self: any(not client.answer for client in self.clients))
    def finish(self) -> None:
        client = next(client for client in self.clients if not client.answer)
        client.sendings[-1].is_finished = True

    @rule()
    @precondition(lambda self: any(not c.answer and c.sendings[-1].is_finished for c in self.clients))
    def deliver(self) -> None:
        client = next(client for client in self.clients if not client.answer)
        client.answer = client.sendings[-1]
        client.answer.is_delivered = True
        client.answer.sockets -= 1

    @invariant()
    def every_call_is_sampled_once(self) -> None:
        assert len(self.sampled) == len(self.clients)
        answers = [client.answer for client in self.clients if client.answer]
        assert len({id(answer) for answer in answers}) == len(answers)
        assert all(request.sockets >= 0 for request in self.sampled)


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
