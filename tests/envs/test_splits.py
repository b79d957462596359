from agentrl_envs.corridor import Corridor
from agentrl_envs.frozen_lake import FrozenLake
from agentrl_envs.negotiation import Negotiation
from agentrl_envs.options import in_split
from tests.support.each import each


def test_one_task_of_some_is_of_evaluation_and_none_of_both() -> None:
    tasks = [f"task {number}" for number in range(4000)]
    for one_in in (4, 5):
        evaluated = {task for task in tasks if in_split(task, "eval", one_in=one_in)}
        assert evaluated | {task for task in tasks if in_split(task, "train", one_in=one_in)} == set(tasks)
        assert not any(in_split(task, "train", one_in=one_in) for task in evaluated)
        assert abs(len(evaluated) - 4000 / one_in) < 110  # four deviations of sqrt(4000 / 4 * 3 / 4) = 27


@each(
    "env",
    [
        Corridor(num_rooms=4, num_doors=1, detour=0),
        FrozenLake(size=4, frozen=0.8),
        Negotiation(num_issues=2, num_levels=3, strategy="steady"),
    ],
)
def test_tasks_of_the_splits_never_meet_where_there_are_few(env: Corridor | FrozenLake | Negotiation) -> None:
    seen: dict[str, set[str | None]] = {"train": set(), "eval": set()}
    for split, keys in seen.items():
        for seed in range(300):
            env.reset(seed=seed, options={"split": split})
            keys.add(env.state_key())
    assert not seen["train"] & seen["eval"]
    assert len(seen["train"]) > len(seen["eval"]) > 5
