from agentrl.engine.base import retry_wait_s


def test_waits_double_up_to_a_minute() -> None:
    assert [retry_wait_s(number, first_s=1.0) for number in range(7)] == [1, 2, 4, 8, 16, 32, 60]
    assert retry_wait_s(10_000, first_s=0.25) == 60
