"""Tests that need a CUDA GPU."""

import os

import pytest
import torch

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def share_one_gpu() -> None:
    """Let the processes of a test use the first GPU, which NCCL refuses on one machine: it takes each for another one.

    In each of them, before it touches CUDA.
    """
    os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo"}
