"""Autocast for the experts of a mixture: torch has none for the grouped matrix product that they are computed by."""

from functools import partial

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")


def cast_experts() -> None:
    """Compute grouped matrix products under autocast in its dtype, as it does for other matrix products.

    Without it, float32 weights of experts would be multiplied in float32. Once for the process; idempotent.
    """
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key):
            _LIBRARY.impl("_grouped_mm", partial(_grouped_mm, device_type), key)


def _grouped_mm(
    device_type: str,
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        product: Tensor = torch.ops.aten._grouped_mm(left.to(dtype), right.to(dtype), offsets, bias, out_dtype)
    return product
