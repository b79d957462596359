"""What many live episodes cost the stream of tasks, its journal and its state, without environments and tokenizer.

    python -m benchmarks.rollout_files [--live 10000] [--tokens 32768] [--long 64]

Plays `live` episodes at once through the stream, three turns of 500 + 60 tokens each, all ending in another order than they
began; then holds `long` episodes of `tokens` tokens, half of them sampled, and writes and reads their state. With `restart`,
each turn is a whole context. Seconds are of the processor: what else the machine does is not counted.
"""

import argparse
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from agentrl.rollout import Journal, LiveEpisode, RolloutConfig, Tasks
from agentrl.rollout.stream import TaskStream
from agentrl.types import FinishReason, StopReason, Trajectory, Turn

VOCABULARY = 150_000


def turn(rng: random.Random, observation: int, action: int, *, context: tuple[int, ...] | None = None) -> Turn:
    """Make a turn up; with a context, of a template that rewrites history: all but 50 tokens of it stay."""
    ids = tuple(rng.choices(range(VOCABULARY), k=observation))
    logprobs = np.log(np.random.default_rng(rng.randrange(2**32)).random(action, dtype=np.float32) * 0.999 + 1e-3)
    return Turn(
        observation_ids=ids if context is None else context[:-50] + ids,
        extends=context is None,
        action_ids=tuple(rng.choices(range(VOCABULARY), k=action)),
        behavior_logprobs=tuple(logprobs.tolist()),
        versions=(3,) * action,
        reward=0.0,
        finish_reason=FinishReason.STOP,
        observation=({"role": "tool", "name": "look", "content": "x" * 4 * observation},),
        message={"role": "assistant", "content": "y" * 4 * action},
        extras={"tool_errors": 0},
    )


def ended(episode: LiveEpisode) -> Trajectory:
    task = episode.task
    return Trajectory(
        group_id=task.group_id,
        trajectory_id=task.trajectory_id,
        env_id="made up",
        seed=task.seed,
        turns=episode.turns,
        stop_reason=StopReason.TERMINATED,
    )


def played(episode: LiveEpisode, new: Turn) -> LiveEpisode:
    return LiveEpisode(task=episode.task, turns=(*episode.turns, new), observation=new.observation)


def new_stream(live: int, folder: Path) -> TaskStream:
    config = RolloutConfig(
        mode="partial", num_groups=-(-live // 24), group_size=8, max_live_episodes=live, max_staleness=2
    )
    stream = TaskStream(config, tasks=Tasks(seed=0), journal=Journal(folder))
    stream.state_dict()
    stream.begin_step(None)
    return stream


def many(live: int) -> dict[str, float]:
    """Play `live` episodes at once; return what that cost."""
    rng = random.Random(0)
    turns = [turn(rng, 500, 60) for _ in range(50)]
    with TemporaryDirectory() as folder:
        scheduled_s = noted_s = handed_s = 0.0
        stream = new_stream(live, Path(folder))
        begin = time.process_time()
        episodes: list[LiveEpisode] = []
        while len(episodes) < live and (episode := stream.next(version=0)) is not None:
            episodes.append(episode)
        scheduled_s += time.process_time() - begin
        for number in range(3):
            begin = time.process_time()
            for index, episode in enumerate(episodes):
                episodes[index] = played(episode, turns[(index + number) % 50])
                stream.record_progress(episodes[index])
            noted_s += time.process_time() - begin
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        begin = time.process_time()
        state = stream.state_dict()
        state_s = time.process_time() - begin
        rng.shuffle(episodes)
        begin = time.process_time()
        version = num_handed = 0
        for episode in episodes:
            stream.record_end(ended(episode))
            given = time.process_time()
            if (groups := stream.hand_out(version=version)) is not None:
                num_handed += len(groups)
                version += 1
                stream.begin_step(None)
            handed_s += time.process_time() - given
            stream.next(version=version)
        scheduled_s += time.process_time() - begin
        stream.close()
    return {
        "live": len(episodes),
        "schedule_s": scheduled_s,
        "of_which_hand_out_s": handed_s,
        "groups": num_handed,
        "note_us": 1e6 * noted_s / (3 * len(episodes)),
        "journal_bytes_per_turn": num_bytes / (3 * len(episodes)),
        "state_s": state_s,
        "state_bytes": len(json.dumps(state)),
    }


def long(num: int, tokens: int, *, restart: bool) -> dict[str, float]:
    """Hold `num` episodes of so many tokens, 8 turns each; return what their journal and state cost."""
    rng = random.Random(0)
    part = tokens // 16
    with TemporaryDirectory() as folder:
        stream = new_stream(max(num, 24), Path(folder))
        note_s = 0.0
        for _ in range(num):
            episode = stream.next(version=0)
            assert episode is not None
            context: tuple[int, ...] = ()
            for number in range(8):
                new = turn(rng, part, part, context=context if restart and number else None)
                context = (new.observation_ids if not new.extends else context + new.observation_ids) + new.action_ids
                episode = played(episode, new)
                begin = time.process_time()
                stream.record_progress(episode)
                note_s += time.process_time() - begin
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        begin = time.process_time()
        text = json.dumps(stream.state_dict())
        dumped_s = time.process_time() - begin
        begin = time.process_time()
        other = TaskStream(stream._config, tasks=Tasks(seed=0))
        other.load_state_dict(json.loads(text))
        loaded_s = time.process_time() - begin
        stream.close()
    return {
        "note_ms": 1e3 * note_s / (8 * num),
        "journal_bytes_per_turn": num_bytes / (8 * num),
        "state_bytes": len(text),
        "state_s": dumped_s,
        "load_s": loaded_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=10_000)
    parser.add_argument("--long", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_768)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "many": many(options.live),
        "long": long(options.long, options.tokens, restart=False),
        "restart": long(max(1, options.long // 8), options.tokens, restart=True),
    }
    for name, row in found.items():
        print(name, *(f"{key} {value:,.6g}" for key, value in row.items()), sep="  ")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
