"""How several servers are dealt out to training processes."""

from agentrl.engine.vllm.common import ServerConfig
from agentrl.engine.vllm.servers import VLLMServerConfig
from tests.support.each import each


@each(
    ("num_servers", "num_processes", "processes", "expected"),
    [
        (1, 1, None, 1),
        (1, 8, None, 1),
        (2, 6, None, 1),  # so that the run outlives either
        (2, 6, 2, 2),
        (2, 1, None, 1),
        (3, 2, None, 1),  # else one of them would have half of the episodes
        (4, 2, None, 2),
        (4, 3, None, 2),
        (4, 8, None, 2),
        (4, 8, 4, 4),
        (4, 8, 1, 1),
        (6, 6, 4, 3),
    ],
)
def test_each_process_that_has_servers_has_as_many_as_another(
    num_servers: int, num_processes: int, processes: int | None, expected: int
) -> None:
    urls = tuple(f"http://host:{8000 + number}" for number in range(num_servers))
    config = VLLMServerConfig(server=ServerConfig(url=urls, processes=processes))
    assert config.num_sampling(num_processes) == expected
