"""Assignment of trajectories to minibatches and to passes of each rank, and the tensors of a pass.

`I` trajectories of a step, `R` rows and `T` trained tokens of a batch or a pass; `P` slots of a pass, `J` routers of a
mixture of experts, `X` experts that each chooses at a slot, `N` tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import UserError
from agentrl.learn.tokens import EngineExperts, Int32Array, TokenBatch
from agentrl.models.moe import UNKNOWN, Experts
from agentrl.policy.config import Layout
from agentrl.policy.layout import Index, Inputs, lay_out, pack
from agentrl.policy.layout.recurrent import num_computed
from agentrl.policy.layout.tree import IntArray, plan_tree
from agentrl.policy.model import Policy

MIN_GROUPS = 4
"""Groups of which a minibatch has trajectories, if the step has as many; with ragged groups sometimes one fewer
(measured: benchmarks/minibatches.py)."""


class Minibatch(NamedTuple):
    """Trajectories of one optimizer step, as indices."""

    computed: list[int]
    counted: list[int]
    """Trajectories without a gradient, which count in the denominators only."""


def draw_minibatches(
    group_I: npt.ArrayLike,
    *,
    has_gradient_I: npt.ArrayLike,
    num_minibatches: int,
    rng: np.random.Generator,
    min_groups: int = MIN_GROUPS,
) -> list[Minibatch]:
    """Draw the minibatches of a step at random; some may be left empty.

    Each minibatch gets its share of the trajectories that have a gradient, of the others, and of all: numbers differ by at
    most one. If no trajectory has a gradient, the first minibatch computes one all the same, to compare the engine's
    log-probabilities with the trainer's.

    Trajectories of a group share a prefix, which is computed once if they are together; but a minibatch of few groups
    has a noisy gradient, or none at all, and a run may collapse by it. So each group is cut into equal parts, which are
    spread evenly over the minibatches: as large as possible for a minibatch to hold parts of `min_groups` groups.
    """
    group_I, has_gradient_I = np.asarray(group_I, dtype=np.int64), np.asarray(has_gradient_I, dtype=np.bool_)
    computed, counted = (rng.permutation(np.flatnonzero(chosen_I)) for chosen_I in (has_gradient_I, ~has_gradient_I))
    if not len(computed):
        computed, counted = counted[:1], counted[1:]
    length = max(1, len(computed) // (num_minibatches * min_groups))
    order = np.empty(len(computed))
    for group in np.unique(group_I[computed]):
        members = np.flatnonzero(group_I[computed] == group)
        num_parts = -(-len(members) // length)
        part = np.arange(len(members)) * num_parts // len(members)
        order[members] = (part + rng.random()) / num_parts
    computed = computed[np.argsort(order, kind="stable")]
    # The first minibatches have one more to compute, the last ones one more to count.
    shares = zip(np.array_split(computed, num_minibatches), np.array_split(counted, num_minibatches)[::-1], strict=True)
    return [Minibatch(of_computed.tolist(), of_counted.tolist()) for of_computed, of_counted in shares]


_EMPTY = np.zeros(1, dtype=np.int64)
"""The row of a pass without a trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Whole trajectories, as tensors for one forward and backward pass."""

    token_T: Int32Array
    """Index of each token in the batch."""
    inputs: Inputs
    slot_T: Tensor
    """Slot at which each token's distribution is read: that of its predecessor."""
    target_T: Tensor
    dtype: torch.dtype
    """Dtype of the columns that `to_device` returns."""
    experts_JPX: Tensor | None = None
    """Experts that the engine chose at each slot, or `UNKNOWN`. None: they are not replayed."""

    def to_device(self, column_T: Tensor) -> Tensor:
        """Return a column of this pass's tokens on its device: numbers in `dtype`, indices as they are."""
        dtype = self.dtype if column_T.is_floating_point() else column_T.dtype
        return column_T.to(device=self.slot_T.device, dtype=dtype)


class PassTokens(NamedTuple):
    """Rows and tokens of one pass: all that the rank that computes it needs to know of a batch."""

    token_T: Int32Array
    """Index of each token in the batch."""
    rows: list[Int32Array]
    """Token ids of each row, up to the last one that is read."""
    row_T: Int32Array
    position_T: Int32Array
    """Position of each token's predecessor."""
    target_T: Int32Array
    experts: list[tuple[EngineExperts, ...]]
    """Experts that the engine returned for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Cuts batches into micro-batches, under a budget of tokens; a trajectory is never split.

    The budget counts computed tokens: shared prefixes of a tree once, padding too. A trajectory that exceeds it
    by itself is a micro-batch of its own. Rows end where nothing more is read. On a tree, trajectories of a group stay
    together, for they share most, as long as the budget allows it; else shortest first.
    """

    max_tokens: int
    """Budget of a micro-batch."""
    layout: Layout = "padded"
    is_recurrent: bool = False
    """Whether parts of the model compute rows one by one, whatever the layout: the budget counts their tokens."""
    can_continue: bool = False
    """Whether these parts compute shared prefixes once, on a tree (see `recurrent.fork`)."""
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    """Dtype of a micro-batch's columns: that of the policy's log-probabilities."""
    vocab_size: int | None = None
    """Tokens that the model knows: one beyond them would end the process on a GPU. None: not checked."""
    pairs_per_token: int = 1024
    """Cost of a token beside attention, in visible pairs of tokens."""
    experts: Experts | None = None
    """Experts of a mixture whose engine's choices are replayed."""

    @classmethod
    def for_policy(cls, policy: Policy, **further: Any) -> "Planner":
        """Return the planner of passes through a policy."""
        vocab_size = policy.model.config.get_text_config().vocab_size
        further |= {"is_recurrent": policy.is_recurrent, "can_continue": policy.can_continue}
        return cls(layout=policy.layout, vocab_size=vocab_size, **further)

    def micro_batches(self, tokens: TokenBatch) -> Iterator[MicroBatch]:
        """Yield the passes of a single rank over a batch; see `assign`."""
        (passes,) = self.assign(tokens)
        return map(self.lay_out, passes)

    def assign(
        self, tokens: TokenBatch, *, num_processes: int = 1, trajectories: Sequence[int] | None = None
    ) -> list[list[PassTokens]]:
        """Return the passes of each rank over a batch.

        Every rank gets as many micro-batches, empty ones at the end of a short share, so that all synchronise equally
        often. The shares are balanced by cost, largest first (LPT, Graham 1969):
        visible pairs of tokens, and `pairs_per_token` for what else a token costs. What stays together on a tree is halved, the
        largest first, if that makes the dearest share cheaper, though its halves compute twice what they share.

        `trajectories` are those to compute (None: all). The others have their share of the denominators in the weights of
        these already.

        Raises:
            UserError: for a token that the model does not know.
        """
        largest = max((int(row.max()) for row in tokens.rows if len(row)), default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise UserError(
                f"token {largest} was recorded, and the model knows {self.vocab_size}: the run's journal or checkpoint is of "
                "another model; delete what is newest of them, and it is sampled again"
            )
        plan = _Plan(tokens, self)
        chosen = range(tokens.num_trajectories) if trajectories is None else trajectories
        return plan.passes(plan.shares([i for i in chosen if plan.members[i]], num_processes))

    def sample(
        self, tokens: TokenBatch, *, share: float, trajectories: Sequence[int], num_processes: int = 1
    ) -> list[list[PassTokens]]:
        """Return the passes of each rank over a sample of the trajectories.

        The sample is the first ones that together compute no more tokens than a share of what all do on a single rank, at
        least one; each is on the rank to which `assign` gives it.
        """
        plan = _Plan(tokens, self)
        read = [i for i in trajectories if plan.members[i]]
        (alone,) = plan.shares(read, 1)
        chosen = set(read[: plan.num_fitting([[i] for i in read], int(share * sum(map(plan.size, alone))))])
        shares = plan.shares(read, num_processes)
        return plan.passes([plan.fill([[i] for of in own for i in of if i in chosen]) for own in shares])

    def lay_out(self, tokens: PassTokens) -> MicroBatch:
        """Return the tensors of a pass."""
        rows = [row.astype(np.int64) for row in tokens.rows]
        inputs, index = lay_out(rows or [_EMPTY], self.layout, device=self.device)
        slot_T = index(tokens.row_T.astype(np.int64), tokens.position_T.astype(np.int64))
        return MicroBatch(
            token_T=tokens.token_T,
            inputs=inputs,
            slot_T=torch.from_numpy(slot_T).to(self.device),
            target_T=torch.from_numpy(tokens.target_T.astype(np.int64)).to(self.device),
            dtype=self.dtype,
            experts_JPX=self._experts(tokens, index, inputs.ids_BL.numel()),
        )

    def _experts(self, tokens: PassTokens, index: Index, num_slots: int) -> Tensor | None:
        """Return the experts that the engine returned; at a slot that rows share, those of the last one."""
        if self.experts is None:
            return None
        experts_PJX = np.full((num_slots, self.experts.num_routers, self.experts.num_chosen), UNKNOWN, dtype=np.int16)
        for number, (row, of_row) in enumerate(zip(tokens.rows, tokens.experts, strict=True)):
            for start, packed in of_row:
                experts_NJX = self.experts.unpack(packed)[: max(0, len(row) - start)]
                position_N = np.arange(start, start + len(experts_NJX))
                experts_PJX[index(np.full_like(position_N, number), position_N)] = experts_NJX
        return torch.from_numpy(experts_PJX).transpose(0, 1)


class _Plan:
    """Trajectories, their rows up to the last token that is read, and their costs."""

    def __init__(self, tokens: TokenBatch, planner: Planner) -> None:
        self._tokens, self._planner = tokens, planner
        needed_R = np.zeros(len(tokens.rows), dtype=np.int64)
        np.maximum.at(needed_R, tokens.row_T, tokens.position_T + 1)
        self.rows = [row[:needed] for row, needed in zip(tokens.rows, needed_R, strict=True)]
        self.members: list[list[int]] = [[] for _ in range(tokens.num_trajectories)]
        """Rows of each trajectory of which something is read."""
        used, first = np.unique(tokens.row_T, return_index=True)
        for row, trajectory in zip(used.tolist(), tokens.trajectory_T[first].tolist(), strict=True):
            self.members[trajectory].append(row)

    def shares(self, trajectories: list[int], num_processes: int) -> list[list[list[int]]]:
        """Return the passes of each rank, as trajectories."""
        parts = self._parts(trajectories)
        if num_processes == 1:
            return [self.fill(parts)]
        costs = [self._cost(part) for part in parts]
        best, best_cost = _distribute(parts, costs, num_processes)
        while parts and len(part := parts[largest := max(range(len(parts)), key=costs.__getitem__)]) > 1:
            if costs[largest] <= sum(costs) / num_processes / 2:  # the shares are about as even as they can be
                break
            halves = [part[: len(part) // 2], part[len(part) // 2 :]]
            parts[largest : largest + 1] = halves
            costs[largest : largest + 1] = map(self._cost, halves)
            candidate, cost = _distribute(parts, costs, num_processes)
            if cost < best_cost:
                best, best_cost = candidate, cost
        return [self.fill(share) for share in best]

    def passes(self, shares: list[list[list[int]]]) -> list[list[PassTokens]]:
        """Return the passes of each rank, with empty ones at the end of a short share."""
        num = max(map(len, shares))
        return [[self._tokens_of(of) for of in (*share, *[[]] * (num - len(share)))] for share in shares]

    def _tokens_of(self, trajectories: list[int]) -> PassTokens:
        """Return rows and tokens of a pass over trajectories."""
        tokens = self._tokens
        chosen = [row for i in trajectories for row in self.members[i]]
        local_R = np.full(len(tokens.rows), -1, dtype=np.int32)
        local_R[chosen] = np.arange(len(chosen))
        token_T = np.flatnonzero(local_R[tokens.row_T] >= 0)
        return PassTokens(
            token_T=token_T.astype(np.int32),
            rows=[self.rows[row].astype(np.int32) for row in chosen],
            row_T=local_R[tokens.row_T[token_T]],
            position_T=tokens.position_T[token_T].astype(np.int32),
            target_T=tokens.target_T[token_T].astype(np.int32),
            experts=[tokens.experts[row] if self._planner.experts else () for row in chosen],
        )

    def _parts(self, trajectories: list[int]) -> list[list[int]]:
        """Return the trajectories that stay together, in an order in which neighbours fit together."""
        if self._planner.layout != "tree":
            return [[i] for i in sorted(trajectories, key=lambda i: (self._longest([i]), i))]
        # By their first tokens, so that groups with a system prompt in common are neighbours.
        key = {i: self.rows[self.members[i][0]].astype(">u4").tobytes() for i in trajectories}
        first: dict[int, bytes] = {}
        for i in trajectories:
            group = self._tokens.groups[i]
            first[group] = min(first.get(group, key[i]), key[i])
        ordered = sorted(trajectories, key=lambda i: (first[self._tokens.groups[i]], self._tokens.groups[i], key[i], i))
        parts = []
        for _, members in groupby(ordered, key=lambda i: self._tokens.groups[i]):
            parts += self.fill([[i] for i in members])  # one part if all of the group fits
        return parts

    def fill(self, parts: Sequence[list[int]]) -> list[list[int]]:
        """Join neighbouring parts as long as they fit into the budget together."""
        passes: list[list[int]] = []
        start = 0
        while start < len(parts):
            stop = start + self.num_fitting(parts[start:], self._planner.max_tokens)
            passes.append(list(chain.from_iterable(parts[start:stop])))
            start = stop
        return passes

    def num_fitting(self, parts: Sequence[list[int]], max_tokens: int) -> int:
        """Return how many parts from the first on fit into a budget together, at least one: doubled, then halved in."""
        fitting, too_many = 1, len(parts) + 1
        while too_many - fitting > 1:
            tried = min(2 * fitting, (fitting + too_many) // 2)
            if self.size(list(chain.from_iterable(parts[:tried]))) <= max_tokens:
                fitting = tried
            else:
                too_many = tried
        return fitting

    def _rows_of(self, trajectories: Sequence[int]) -> list[IntArray]:
        return [self.rows[row] for i in trajectories for row in self.members[i]]

    def _longest(self, trajectories: Sequence[int]) -> int:
        return max(map(len, self._rows_of(trajectories)))

    def size(self, trajectories: Sequence[int]) -> int:
        """Return the tokens that a pass computes."""
        rows, planner = self._rows_of(trajectories), self._planner
        match "padded" if planner.is_recurrent and planner.layout == "packed" else planner.layout:
            case "tree":
                tree = plan_tree(rows)
                apart = num_computed(tree.paths, continues=planner.can_continue) if planner.is_recurrent else 0
                return max(tree.num_tokens, apart)
            case "packed":
                return len(pack([len(row) for row in rows])) * self._longest(trajectories)
            case "padded":
                return len(rows) * self._longest(trajectories)

    def _cost(self, trajectories: Sequence[int]) -> float:
        rows = self._rows_of(trajectories)
        if self._planner.layout == "tree":
            tree = plan_tree(rows)
            return tree.attention_cost + self._planner.pairs_per_token * tree.num_tokens
        return sum(len(row) * ((len(row) + 1) / 2 + self._planner.pairs_per_token) for row in rows)


def _distribute(
    parts: Sequence[list[int]], costs: Sequence[float], num_processes: int
) -> tuple[list[list[list[int]]], float]:
    """Return the parts of each rank, in their order, and the cost of the dearest share: largest first (LPT)."""
    loads = [(0.0, rank) for rank in range(num_processes)]
    owner = [0] * len(parts)
    for number in sorted(range(len(parts)), key=lambda number: -costs[number]):
        load, owner[number] = loads[0]
        heapreplace(loads, (load + costs[number], owner[number]))
    shares = [[part for part, of in zip(parts, owner, strict=True) if of == rank] for rank in range(num_processes)]
    return shares, max(load for load, _ in loads)
