"""Experts of a mixture-of-experts model: recorded, replayed and compared.

`cast_experts` adds autocast for the grouped matrix product of experts, which torch lacks.

`J` routers of a model, `P` slots of a pass, `X` experts chosen at a slot, `E` experts to choose from, `Q` slots that
are asked for, `N` tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.errors import TrainingError

UNKNOWN = -1
"""Placeholder for unknown experts: in a replay, the router takes its own there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    """The part of a sparse layer that chooses among its experts."""

    name: str
    """Name of the module within the model."""
    module: nn.Module
    num_experts: int
    """Experts to choose from (E)."""


def routers_of(model: Any) -> list[Router]:
    """Return the routers of a transformers model in the order of its layers; none of a dense one.

    A router is the module `gate` or `router` that stands beside `experts`, as in Mixtral, OLMoE, GPT-OSS and Granite,
    and in the models of Qwen, DeepSeek and GLM.

    Raises:
        TrainingError: for experts without such a router.
    """
    routers = []
    for layer_name, layer in model.named_modules():
        children = dict(layer.named_children())
        if "experts" not in children:
            continue
        name = next((name for name in ("gate", "router") if name in children), None)
        num_experts = getattr(children["experts"], "num_experts", None)
        if name is None or num_experts is None:
            raise TrainingError(
                f"{type(model).__name__}: {layer_name} ({type(layer).__name__}) has experts, but no `gate` or `router` "
                "beside them, or not their number; its routing can be neither recorded nor replayed"
            )
        routers.append(Router(name=f"{layer_name}.{name}", module=children[name], num_experts=num_experts))
    return routers


def recording(model: Any) -> AbstractContextManager[list[Tensor]]:
    """Note the experts that the routers choose.

    The context gives a list that gains one int16 tensor `(J, P, X)` with each forward pass of the model: of each router
    (as in `routers_of`) and slot, the experts in the router's own order. Layers that gradient checkpointing runs again
    add nothing. A dense model leaves the list empty.

    Raises:
        TrainingError: after a pass in which a router did not choose once, by one `torch.topk` over all of its experts.
    """
    return _routing(model, None)


def replaying(model: Any, experts_JPX: Tensor) -> AbstractContextManager[list[Tensor]]:
    """Let the routers take the given experts instead of their own choice, in each pass and whenever a layer runs again.

        g_k = norm(score(x W^T)[e_k]),  output = sum_k g_k expert_{e_k}(x),  e = the given experts of the slot

    Routing Replay (arXiv 2507.18071, section 5.3) if the experts are those of the weights before the first update;
    arXiv 2510.11370, section 4, replays those of the engine instead. Scores, their norm and their gradient, also in the
    weights W of the router, are the model's own, under the present weights: the `torch.topk` that chooses among all
    experts is all that is replaced.

    The context gives what `recording` gives: the experts that the routers would have chosen themselves. Under gradient
    checkpointing the backward pass must lie within the context as well.

    Shape: integers `(J, P, X)`, as `recording` gives them for a pass over the same slots, or `UNKNOWN`; on any device.

    Raises:
        TrainingError: for a model whose routing cannot be replayed, or experts of another number of routers, slots or
            experts at a slot.
    """
    return _routing(model, experts_JPX)


def changed_share(before_JPX: Tensor, after_JPX: Tensor, *, slots_Q: Tensor | None = None) -> Tensor:
    """Return of each slot the share of its experts that are others than before, in the mean over routers: (Q,).

        changed_p = mean over routers r of 1 - |before_rp ∩ after_rp| / X

    Measured after one update it is what arXiv 2507.18071 (section 5.3) puts at about 10 % for Qwen3-30B-A3B. The order of
    a slot's experts does not count. `slots_Q` are indices into P; None: all.

    Raises:
        ValueError: for recordings of different shape.
    """
    if before_JPX.shape != after_JPX.shape or before_JPX.ndim != 3:
        raise ValueError(
            f"expected two recordings (J, P, X) of the same slots, got {tuple(before_JPX.shape)} and "
            f"{tuple(after_JPX.shape)}"
        )
    if slots_Q is not None:
        before_JPX, after_JPX = before_JPX[:, slots_Q], after_JPX[:, slots_Q]
    kept_JQX = (before_JPX[..., :, None] == after_JPX[..., None, :]).any(-1)
    return 1 - kept_JQX.double().mean((0, 2))


class Experts(NamedTuple):
    """Encoding of a model's experts as an engine returns them: a byte for each, two if there are more than 256."""

    num_routers: int
    num_chosen: int
    """By each router, for each token (X)."""
    num_experts: int
    """To choose from (E)."""

    def pack(self, experts_NJX: npt.NDArray[Any]) -> bytes:
        """Write the experts of N tokens.

        Raises:
            ValueError: if they are not those of such a model.
        """
        num, expected = self.num_experts, (self.num_routers, self.num_chosen)
        if experts_NJX.shape[1:] != expected:
            raise ValueError(
                f"experts (tokens, routers, chosen) {experts_NJX.shape}, expected (tokens, {expected[0]}, {expected[1]})"
            )
        if experts_NJX.size and not 0 <= experts_NJX.min() <= experts_NJX.max() < num:
            raise ValueError(f"experts from {experts_NJX.min()} to {experts_NJX.max()}, expected from 0 to {num - 1}")
        return experts_NJX.astype(self._dtype).tobytes()

    def unpack(self, packed: bytes) -> npt.NDArray[np.int16]:
        """Return the argument of `pack`: (N, J, X)."""
        found = np.frombuffer(packed, dtype=self._dtype).astype(np.int16)
        return found.reshape(-1, self.num_routers, self.num_chosen)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a token's experts."""
        return self.num_routers * self.num_chosen * self._dtype().itemsize

    @property
    def _dtype(self) -> type[np.uint8 | np.uint16]:
        return np.uint8 if self.num_experts <= 256 else np.uint16


def experts_of(model: Any) -> Experts | None:
    """Return the encoding of a model's experts. None: it has none.

    Raises:
        TrainingError: as `routers_of`, and if layers choose among different or unknown numbers of experts.
    """
    routers = routers_of(model)
    if not routers:
        return None
    numbers = {router.num_experts for router in routers}
    num_chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if len(numbers) > 1 or not isinstance(num_chosen, int):
        raise TrainingError(
            f"{type(model).__name__} chooses num_experts_per_tok: {num_chosen} of {sorted(numbers)} experts; an engine's "
            "choice can be replayed where all layers have as many, and choose as many"
        )
    return Experts(len(routers), num_chosen, numbers.pop())


class _Choosing(TorchFunctionMode):
    """While a router runs: notes which experts it chooses among all, and puts those to be replayed in their place."""

    def __init__(self, router: Router, experts_PX: Tensor | None) -> None:
        super().__init__()
        self.router, self.experts_PX = router, experts_PX
        self.own: list[Tensor] = []
        """The router's own choices since the pass began, (P, X) each."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Routers that first choose among groups of experts do so by narrower or 3-dimensional scores.
        if func not in (torch.topk, Tensor.topk) or args[0].shape[1:] != (self.router.num_experts,):
            return result
        scores_PE, own_PX = args[0], result.indices
        self.own.append(own_PX)
        if self.experts_PX is None:
            return result
        if self.experts_PX.shape != own_PX.shape:
            raise TrainingError(
                f"{self.router.name} chooses experts (slots, experts) {tuple(own_PX.shape)}, got "
                f"{tuple(self.experts_PX.shape)} to replay; replay each pass with the experts recorded on the same inputs"
            )
        experts_PX = self.experts_PX.to(own_PX)
        experts_PX = torch.where(experts_PX == UNKNOWN, own_PX, experts_PX)
        return torch.return_types.topk((scores_PE.gather(1, experts_PX), experts_PX))


@contextmanager
def _routing(model: Any, experts_JPX: Tensor | None) -> Iterator[list[Tensor]]:
    """Record, and replay if there are experts to replay."""
    routers = routers_of(model)
    if experts_JPX is not None:
        _check_replay(model, routers, experts_JPX)
    modes = [_Choosing(router, None if experts_JPX is None else experts_JPX[r]) for r, router in enumerate(routers)]
    passes: list[Tensor] = []

    def begin(*_: Any) -> None:
        for mode in modes:
            mode.own.clear()

    def end(*_: Any) -> None:
        passes.append(_chosen(model, modes))

    with ExitStack() as stack:
        if modes:
            stack.enter_context(model.base_model.register_forward_pre_hook(begin))
            stack.enter_context(model.base_model.register_forward_hook(end))
        for mode in modes:
            stack.enter_context(_running_in(mode, mode.router.module))
        yield passes


@contextmanager
def _running_in(mode: TorchFunctionMode, module: nn.Module) -> Iterator[None]:
    """Let a module run in a mode, on whatever thread it is called."""
    forward, before = module.forward, vars(module).get("forward")

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    module.forward = run
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _chosen(model: Any, modes: list[_Choosing]) -> Tensor:
    """Return the experts (J, P, X) of the pass that ends."""
    for mode in modes:
        if len(mode.own) != 1:
            name, module = mode.router.name, mode.router.module
            raise TrainingError(
                f"{type(model).__name__}: {name} ({type(module).__name__}) chose {len(mode.own)} times in one pass, "
                f"expected once, by one torch.topk over its {mode.router.num_experts} experts; its routing can be "
                "neither recorded nor replayed"
            )
    if len(shapes := {tuple(mode.own[0].shape) for mode in modes}) > 1:
        raise TrainingError(
            f"{type(model).__name__}: its routers chose experts of different shape (slots, experts) in one pass, "
            f"{sorted(shapes)}; its routing can be neither recorded nor replayed"
        )
    return torch.stack([mode.own[0].to(torch.int16) for mode in modes])  # small: a step keeps them of all its passes


def _check_replay(model: Any, routers: list[Router], experts_JPX: Tensor) -> None:
    """Check the experts as far as possible before a pass."""
    if experts_JPX.ndim != 3 or experts_JPX.is_floating_point():
        raise TrainingError(f"expected integer experts (J, P, X), got {experts_JPX.dtype} {tuple(experts_JPX.shape)}")
    if len(experts_JPX) != len(routers):
        raise TrainingError(f"{type(model).__name__} has {len(routers)} routers, got experts of {len(experts_JPX)}")
    for router in routers:
        # DeepSeek-V2: experts outside the groups that are best now would get weight 0.
        if getattr(router.module, "topk_method", None) == "group_limited_greedy":
            raise TrainingError(
                f"{type(model).__name__}: {router.name} chooses among scores from which it has struck groups of experts "
                "(topk_method: group_limited_greedy); its routing cannot be replayed"
            )


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
