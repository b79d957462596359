"""The critic: a value for each token's context, in units of reward.

`T` action tokens, `P` slots of a pass, `D` hidden size.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.distributed.processes import all_reduce, from_rank_zero, num_processes, scatter
from agentrl.learn.interrupt import check_interrupt
from agentrl.learn.plan import MicroBatch, PassTokens, Planner
from agentrl.learn.signals.base import CriticConfig
from agentrl.learn.signals.scoring import score_tokens, with_tokens
from agentrl.learn.tokens import FloatArray, TokenBatch, rows_of, with_end, with_ends_of_turns
from agentrl.policy.layout import attending, hidden_states
from agentrl.policy.model import Policy
from agentrl.rollout import derive_seed
from agentrl.types import Trajectory


class Critic:
    """Predicts the return-to-go of the turn that a token belongs to, from the context before the token.

    Trained by least squares on G_k = r_k + gamma * G_{k+1}. A truncated trajectory continues from the critic's own value at
    its end: that of the context after its last action, which is trained on G_{k+1} after the action of every turn k that
    another follows. Rank 0 has the trajectories, and scatters every minibatch.
    """

    def __init__(
        self,
        policy: Policy,
        config: CriticConfig,
        *,
        gamma: float,
        max_tokens: int,
        seed: int,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make a critic whose first values are 0.

        Args:
            policy: policy in training, from whose hidden states values are predicted.
            config: kind and optimizer.
            gamma: discount from turn to turn, that of the credit scheme.
            max_tokens: budget of a micro-batch.
            seed: initial weights and order of trajectories.
            autocast: context of the pass through the model; the two layers on top of it stay in float32.
        """
        self._policy = policy
        self._config = config
        self._gamma = gamma
        self._max_tokens = max_tokens
        self._seed = seed
        self._autocast = autocast
        self._device = next(policy.parameters()).device
        self._is_separate = config.model == "separate"
        self._body: Any = copy.deepcopy(policy.model.base_model) if self._is_separate else policy.model.base_model
        size = policy.model.get_output_embeddings().weight.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "critic"))
            self._head = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1)).to(self._device)
        nn.init.zeros_(self._last.weight)
        nn.init.zeros_(self._last.bias)
        self._optimizer = torch.optim.AdamW(self._parameters(), lr=config.learning_rate, weight_decay=0.0)
        self._num_updates = 0

    def begin(self) -> None:
        """Copy the policy's weights if the critic is a model of its own: called once the policy is warmed up."""
        if self._is_separate:
            self._body.load_state_dict(self._policy.model.base_model.state_dict())

    def measure(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with `values` at every turn, and that after the last token."""
        rows = [with_end(rows_of(t.turns)) for t in trajectories]
        tokens = TokenBatch.from_rows(rows, group_ids=[t.group_id for t in trajectories])
        values = score_tokens(self._value, tokens, planner=self._planner())
        measured = with_tokens(trajectories, "values", [values_T[:-1] for values_T in values])
        return [
            replace(t, signals={**t.signals, "values": float(values_T[-1])})
            for t, values_T in zip(measured, values, strict=True)
        ]

    def fit(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Fit measured trajectories; return the loss and how much of the returns' variance the values explained before.

        `critic/explained_variance` is 1 - var(G - V) / var(G): 1 is perfect, 0 a constant, below 0 worse than that;
        0 if all G are equal up to rounding.
        """
        returns = [self._returns(t) for t in trajectories]
        explained, num_trajectories = from_rank_zero(lambda: (_explained(trajectories, returns), len(trajectories)))
        losses: list[float] = []
        for _ in range(self._config.epochs):
            rng = np.random.default_rng(derive_seed(self._seed, "critic order", self._num_updates))
            order = rng.permutation(num_trajectories)
            losses.extend(
                self._update(part.tolist(), trajectories, returns)
                for part in np.array_split(order, self._config.num_minibatches)
                if len(part)
            )
        return {"critic/loss": float(np.mean(losses)), "critic/explained_variance": explained}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "head": self._head.state_dict(),
            "body": self._body.state_dict() if self._is_separate else {},
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self._num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the learning rate is that of the recipe."""
        self._head.load_state_dict(state["head"])
        if self._is_separate:
            self._body.load_state_dict(state["body"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate
        self._num_updates = state["num_updates"]

    @property
    def _last(self) -> nn.Linear:
        layer = self._head[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def _parameters(self) -> list[nn.Parameter]:
        return [*self._head.parameters(), *(self._body.parameters() if self._is_separate else ())]

    def _value(self, micro: MicroBatch) -> Tensor:
        """Return the value of each token's context: (T,)."""
        with self._autocast(), torch.set_grad_enabled(self._is_separate and torch.is_grad_enabled()):
            hidden_PD = hidden_states(self._body, micro.inputs)
        values: Tensor = self._head(hidden_PD[micro.slot_T].to(self._last.weight.dtype))[:, 0]
        return values

    def _returns(self, trajectory: Trajectory) -> FloatArray:
        """Return G_k of each of the K turns, and the value after the last one: (K + 1,)."""
        returns = [trajectory.signals["values"] if trajectory.truncated else 0.0]
        for turn in reversed(trajectory.turns):
            returns.append(turn.reward + self._gamma * returns[-1])
        return np.array(returns[::-1], dtype=np.float64)

    def _planner(self) -> Planner:
        return Planner.for_policy(self._policy, max_tokens=self._max_tokens, device=self._device)

    def _update(self, part: list[int], trajectories: Sequence[Trajectory], returns: Sequence[FloatArray]) -> float:
        """Fit the values of some to their targets by one step of the optimizer; return the mean square."""
        planner, total = self._planner(), torch.zeros((), device=self._device, dtype=torch.float64)

        def shares() -> list[list[tuple[PassTokens, Tensor, float]]]:
            chosen = [trajectories[i] for i in part]
            rows = [with_ends_of_turns(rows_of(t.turns)) for t in chosen]
            tokens = TokenBatch.from_rows(rows, group_ids=[t.group_id for t in chosen])
            targets_T = torch.from_numpy(np.concatenate([_targets(trajectories[i], returns[i]) for i in part]))
            dealt_out = planner.assign(tokens, num_processes=num_processes())
            return [[(each, targets_T[each.token_T], 1 / len(tokens)) for each in share] for share in dealt_out]

        for of_pass, target_T, weight in scatter(shares):
            check_interrupt()
            micro = planner.lay_out(of_pass)
            with attending(self._body, self._policy.layout):
                loss: Any = (weight * (self._value(micro) - micro.to_device(target_T)) ** 2).sum()
                loss.backward()
            total += loss.detach()
        all_reduce([*(p.grad for p in self._parameters() if p.grad is not None), total])
        torch.nn.utils.clip_grad_norm_(self._parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_updates += 1
        return total.item()


def _targets(trajectory: Trajectory, returns: FloatArray) -> FloatArray:
    """Return the targets of values: for each turn's tokens and the context after them; for the last turn its tokens alone."""
    lengths = [len(turn.action_ids) for turn in trajectory.turns]
    parts = [
        np.append(np.full(num, now), after) for num, now, after in zip(lengths, returns, returns[1:], strict=False)
    ]
    targets: FloatArray = np.concatenate([np.empty(0), *parts])[:-1]
    return targets


def _explained(trajectories: Sequence[Trajectory], returns: Sequence[FloatArray]) -> float:
    values_T = np.concatenate([turn.signals["values"] for t in trajectories for turn in t.turns])
    lengths = [[len(turn.action_ids) for turn in t.turns] for t in trajectories]
    targets_T = np.concatenate([np.repeat(each[:-1], of) for each, of in zip(returns, lengths, strict=True)])
    is_flat = np.ptp(targets_T) <= 1e-12 * np.abs(targets_T).max()
    return 0.0 if is_flat else 1 - float((targets_T - values_T).var() / targets_T.var())
