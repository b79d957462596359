"""States of a process's random generators, in a file format that runs no code."""

import random
from typing import Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict


class RandomState(BaseModel):
    """States of the global generators of Python, numpy and torch. agentrl draws nothing from them once a run has started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    torch: str
    """State in hexadecimal digits, like `cuda`."""
    cuda: list[str]

    @classmethod
    def now(cls) -> Self:
        """Return the states at this moment."""
        name, keys, *rest = np.random.get_state(legacy=True)
        return cls.model_validate(
            {
                "python": random.getstate(),
                "numpy": (name, np.asarray(keys).tolist(), *rest),
                "torch": _digits(torch.get_rng_state()),
                "cuda": [_digits(state) for state in torch.cuda.get_rng_state_all()],
            }
        )

    def restore(self) -> None:
        """Restore the generators, for as many GPUs as there are now."""
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(_bytes(self.torch))
        for device in range(min(torch.cuda.device_count(), len(self.cuda))):
            torch.cuda.set_rng_state(_bytes(self.cuda[device]), device)


def _digits(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
