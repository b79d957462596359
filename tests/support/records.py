"""Records of rollouts by hand."""

from agentrl.report.records import TrajectoryRecord, TurnRecord
from agentrl.types import Message, StopReason


def turn(
    observation: list[Message], pieces: list[str], advantages: list[float], *, keep: list[bool] | None = None
) -> TurnRecord:
    num = len(pieces)
    return TurnRecord(
        observation=observation,
        message={"role": "assistant", "content": "".join(pieces)},
        observation_ids=[1],
        extends=True,
        action_ids=list(range(num)),
        action_pieces=pieces,
        behavior_logprobs=[0.0] * num,
        versions=[0] * num,
        advantages=advantages,
        keep=keep or [True] * num,
        reward=0.25,
        state_key=None,
        next_state_key=None,
        action_key=None,
        finish_reason="stop",
        extras={},
    )


def record(*turns: TurnRecord, error: str | None = None, metrics: dict[str, float] | None = None) -> TrajectoryRecord:
    return TrajectoryRecord(
        step=1,
        group_id="train/000001",
        trajectory_id="train/000001/2",
        env_id="desk",
        seed=1,
        stop_reason=StopReason.ENV_ERROR if error else StopReason.TERMINATED,
        truncated=False,
        reward=0.5,
        metrics=metrics or {},
        error=error,
        turns=list(turns),
    )
