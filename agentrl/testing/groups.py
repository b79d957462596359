"""Groups of trajectories from nested lists, for authors of credit schemes and for tests."""

from collections.abc import Sequence
from typing import Any

from agentrl.errors import UserError
from agentrl.learn.signals import signal_classes
from agentrl.recipe.registry import suggest
from agentrl.types import Need, StopReason, Trajectory, TrajectoryGroup, Turn

Nested = Sequence[Sequence[Any]]


def make_group(
    rewards: Sequence[Sequence[float]],
    *,
    state_keys: Sequence[Sequence[str | None]] | None = None,
    action_keys: Sequence[Sequence[str | None]] | None = None,
    action_lengths: Sequence[Sequence[int]] | None = None,
    observation_lengths: Sequence[Sequence[int]] | None = None,
    group_id: str | None = None,
    **fields: Nested | None,
) -> TrajectoryGroup:
    """Build a group from nested lists: one inner list a trajectory, one entry a turn.

    Trajectories are named `<group_id>/<index>` and ended by the environment. Token ids, log-probabilities and policy
    versions (0) are made up, the same at each call; the members share their first observation.

    Args:
        rewards: reward of each turn; its shape is the shape of all the others.
        state_keys: key of the situation before each turn; the next turn's becomes the `next_state_key`.
        action_keys: key of each turn's action.
        action_lengths: number of sampled tokens of each turn, 1 if not given.
        observation_lengths: number of observation tokens before each turn, 2 if not given.
        group_id: "g" if not given.
        fields: any other field of `Turn`, or any signal, such as values; if it holds one number for each
            action token, one number stands for all of them. None: this turn lacks the signal.

    Raises:
        UserError: naming the argument whose shape is not that of `rewards`.
    """
    group_id = "g" if group_id is None else group_id
    given: dict[str, Nested | None] = {"state_keys": state_keys, "action_keys": action_keys}
    given |= {"action_lengths": action_lengths, "observation_lengths": observation_lengths}
    signals, known = signal_classes(), [*Turn.__dataclass_fields__, *map(str, signal_classes())]
    if unknown := sorted(fields.keys() - set(known)):
        raise UserError(f"{unknown[0]}: a turn has no such field.{suggest(unknown[0], known)}")
    given |= (own_fields := {name: nested for name, nested in fields.items() if nested is not None})
    for name, nested in given.items():
        _check_shape(name, nested, rewards)

    def at(nested: Nested | None, i: int, k: int, default: Any = None) -> Any:
        return default if nested is None or k >= len(nested[i]) else nested[i][k]

    def turn(i: int, k: int) -> Turn:
        num_actions, num_observations = at(action_lengths, i, k, 1), at(observation_lengths, i, k, 2)
        first = 0 if k == 0 else 5 * i + 3 * k
        own = {name: _spread(name, nested[i][k], num_actions) for name, nested in own_fields.items()}
        made_up: dict[str, Any] = {
            "behavior_logprobs": tuple(-0.25 * (1 + (i + k + t) % 5) for t in range(num_actions)),
            "signals": {name: value for name, value in own.items() if name in signals and value is not None},
            "observation_ids": tuple(4 + (first + t) % 28 for t in range(num_observations)),
            "action_ids": tuple(32 + (7 * i + 3 * k + t) % 32 for t in range(num_actions)),
            "versions": (0,) * num_actions,
            "reward": float(rewards[i][k]),
            "state_key": at(state_keys, i, k),
            "next_state_key": at(state_keys, i, k + 1),
            "action_key": at(action_keys, i, k),
        }
        return Turn(**made_up | {name: value for name, value in own.items() if name not in signals})

    return TrajectoryGroup(
        group_id=group_id,
        trajectories=tuple(
            Trajectory(
                group_id=group_id,
                trajectory_id=f"{group_id}/{i}",
                env_id="made-up",
                seed=0,
                turns=tuple(turn(i, k) for k in range(len(row))),
                stop_reason=StopReason.TERMINATED,
            )
            for i, row in enumerate(rewards)
        ),
    )


def _check_shape(name: str, nested: Nested | None, rewards: Nested) -> None:
    if nested is not None and [len(row) for row in nested] != [len(row) for row in rewards]:
        raise UserError(
            f"{name}: expected one list for each trajectory with one entry for each turn, of lengths "
            f"{[len(row) for row in rewards]} as in rewards, got lengths {[len(row) for row in nested]}"
        )


def _spread(name: str, value: Any, num: int) -> Any:
    """Return a field's value with one entry for each action token, if it is one that has such."""
    signals = signal_classes()
    is_per_token = signals[Need(name)].is_per_token if name in signals else name in ("behavior_logprobs", "versions")
    if not is_per_token or value is None:
        return value
    if isinstance(value, Sequence):
        return tuple(value)
    return (int(value) if name == "versions" else float(value),) * num
