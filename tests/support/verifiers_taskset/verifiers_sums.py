"""A taskset of verifiers, for the Python that has it."""

import os
import sys
import time
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "die":
            print("out of cheese", file=sys.stderr, flush=True)
            os._exit(3)
        if trace.last_reply == "hang":
            time.sleep(600)
        if trace.last_reply == "raise":
            raise ZeroDivisionError("division by zero")
        print("scoring")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)


class SumConfig(vf.TasksetConfig):
    num_sums: int = 40


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(self.config.num_sums):
            yield SumTask(SumData(prompt=f"{number} + {number}?", system_prompt="Add.", answer=str(2 * number)))
