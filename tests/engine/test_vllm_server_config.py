"""How many training processes play on the servers that they share."""

from agentrl.engine.vllm.servers import VLLMServerConfig
from tests.support.each import each


@each(
    ("num_processes", "num_groups", "expected"),
    [(1, 7, 1), (2, 8, 2), (6, 8, 4), (3, 7, 1), (8, 8, 8), (16, 8, 8)],
)
def test_as_many_processes_play_as_can_have_the_same_number_of_groups(
    num_processes: int, num_groups: int, expected: int
) -> None:
    assert VLLMServerConfig().num_sampling(num_processes, num_groups=num_groups) == expected
