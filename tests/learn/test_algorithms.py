"""Every algorithm by name, from rewards to the gradient: against TRL's own code if it has it, else against its equations.

`B` trajectories, `T` tokens of the longest. Everything is float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl import Credit, Trajectory, TrajectoryGroup, assign_credit, load_credit
from agentrl.learn.batch import make_batch
from agentrl.learn.calibration import Calibration
from agentrl.learn.config import LossConfig, algorithms
from agentrl.learn.metrics import Observations
from agentrl.learn.micro_batch_loss import AnchorState, micro_batch_loss, trust_region
from agentrl.recipe.config import load_recipe
from tests.support.each import each
from tests.support.ratio_batches import close
from tests.support.signals import with_signals
from tests.support.trajectories import trajectory, turn
from tests.support.trl_losses import Padded, gmpo_loss, is_installed, trl_loss

LONGEST = 40
"""Tokens that an episode may have; none has as many."""
SPREADS = (1e-4, 0.3, 3.0)
"""Of the moves of log-odds since sampling, by trajectory: within every range, beyond those of trajectories, beyond all."""


class Sampled(NamedTuple):
    """Groups, and the log-probabilities of their tokens."""

    groups: list[TrajectoryGroup]
    padded: Padded
    """Without advantages."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [member for group in self.groups for member in group.trajectories]


@cache
def sampled() -> Sampled:
    """Draw three groups of episodes of 1 to 4 turns of 1 to 6 tokens; those of the last group earn alike."""
    rng = np.random.default_rng(7)
    groups, columns = [], []
    for g in range(3):
        members = []
        for number in range(5):
            turns = []
            for _ in range(int(rng.integers(1, 5))):
                num = int(rng.integers(1, 7))
                odds_T = 1.5 * rng.normal(size=num) - 0.5
                moved_T, old_T, reference_T = (
                    odds_T + spread * rng.normal(size=num) for spread in (SPREADS[(g + number) % 3], 0.2, 0.5)
                )
                logprobs = [(-np.logaddexp(0, -odds)).tolist() for odds in (odds_T, moved_T, old_T, reference_T)]
                columns.append([*logprobs, rng.exponential(size=num).tolist()])
                acted = turn([1, 2], [3] * num, logprobs=logprobs[0])
                reward, values = float(rng.normal()), tuple(rng.normal(size=num).tolist())
                turns.append(
                    with_signals(replace(acted, versions=(0,) * num, reward=reward if g < 2 else 0.0), values=values)
                )
            members.append(trajectory(number, *turns, group=f"g{g}"))
        groups.append(TrajectoryGroup(group_id=f"g{g}", trajectories=tuple(members)))
    lengths = [len(member.turns) for group in groups for member in group.trajectories]
    by_trajectory = iter(columns)
    rows = [
        [list(chain(*column)) for column in zip(*(next(by_trajectory) for _ in range(num)), strict=True)]
        for num in lengths
    ]
    behavior, policy, old, reference, entropy = (padded([row[i] for row in rows]) for i in range(5))
    none_BT = torch.zeros_like(policy)
    mask_BT = padded([[1.0] * len(row[0]) for row in rows])
    return Sampled(
        groups,
        Padded(
            policy_BT=policy,
            old_BT=old,
            behavior_BT=behavior,
            reference_BT=reference,
            entropy_BT=entropy,
            advantages_BT=none_BT,
            mask_BT=mask_BT,
        ),
    )


def padded(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


# --- advantages ------------------------------------------------------------------------------------------------------


Advantages = Callable[[list[TrajectoryGroup]], list[list[float]]]
"""From groups to the advantage of each turn of each trajectory."""


def compared(groups: list[TrajectoryGroup], *, kind: str) -> list[list[float]]:
    """The papers' comparisons of whole returns, for every turn."""
    found = []
    for group in groups:
        returns = [sum(turn.reward for turn in member.turns) for member in group.trajectories]
        mean, num = sum(returns) / len(returns), len(returns)
        deviation = (sum((one - mean) ** 2 for one in returns) / (num - 1)) ** 0.5
        found += [
            {
                "std": (one - mean) / (deviation + 1e-6),
                "none": one - mean,
                "leave_one_out": one - (sum(returns) - one) / (num - 1),
                "batch": one - mean,
            }[kind]
            for one in returns
        ]
    if kind == "batch":
        over_all = (sum(one**2 for one in found) / (len(found) - 1)) ** 0.5
        found = [one / (over_all + 1e-6) for one in found]
    turns = [len(member.turns) for group in groups for member in group.trajectories]
    return [[one] * num for one, num in zip(found, turns, strict=True)]


def generalized(groups: list[TrajectoryGroup]) -> list[list[float]]:
    """GAE over turns, arXiv 1506.02438 eq. 16, gamma 1 and lambda .95."""
    found = []
    for member in (member for group in groups for member in group.trajectories):
        values = [turn.signals["values"][0] for turn in member.turns]
        after, advantages = 0.0, list[float]()
        for k in reversed(range(len(values))):
            following = values[k + 1] if k + 1 < len(values) else 0.0
            after = member.turns[k].reward + following - values[k] + 0.95 * after
            advantages.insert(0, after)
        found.append(advantages)
    return found


# --- losses of the equations -----------------------------------------------------------------------------------------


def trajectory_mean(terms_BT: Tensor, batch: Padded) -> Tensor:
    return ((terms_BT * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)).mean()


def token_mean(terms_BT: Tensor, batch: Padded) -> Tensor:
    return (terms_BT * batch.mask_BT).sum() / batch.mask_BT.sum()


def by_constant(terms_BT: Tensor, batch: Padded) -> Tensor:
    return (terms_BT * batch.mask_BT).sum() / (len(terms_BT) * LONGEST)


Mean = Callable[[Tensor, Padded], Tensor]


def score_function(batch: Padded, *, mean: Mean) -> Tensor:
    return -mean(batch.advantages_BT * batch.policy_BT, batch)


def clipped_surrogate(batch: Padded, *, mean: Mean, low: float, high: float) -> Tensor:
    """PPO, arXiv 1707.06347 eq. 7."""
    ratio_BT = (batch.policy_BT - batch.old_BT).exp()
    ends_BT = ratio_BT.clamp(1 - low, 1 + high)
    return -mean(torch.minimum(ratio_BT * batch.advantages_BT, ends_BT * batch.advantages_BT), batch)


def sequence_ratio(batch: Padded) -> Tensor:
    """GSPO-token, arXiv 2507.18071 eq. 14: sg[s_i] pi / sg[pi]."""
    mean_B = ((batch.policy_BT - batch.old_BT) * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
    return mean_B.exp().detach()[:, None] * (batch.policy_BT - batch.policy_BT.detach()).exp()


def gspo_token(batch: Padded) -> Tensor:
    """GSPO-token, arXiv 2507.18071 eq. 13."""
    ratio_BT = sequence_ratio(batch)
    ends_BT = ratio_BT.clamp(1 - 3e-4, 1 + 4e-4)
    terms_BT = torch.minimum(ratio_BT * batch.advantages_BT, ends_BT * batch.advantages_BT)
    return -trajectory_mean(terms_BT, batch)


def gspo_hybrid(batch: Padded) -> Tensor:
    """The ratio of GSPO-token; a token whose own ratio is out of its range is a constant."""
    own_BT = (batch.policy_BT - batch.old_BT).exp().detach()
    is_out_BT = ((batch.advantages_BT > 0) & (own_BT > 1.27)) | ((batch.advantages_BT < 0) & (own_BT < 0.8))
    ratio_BT = sequence_ratio(batch)
    terms_BT = torch.where(is_out_BT, ratio_BT.detach(), ratio_BT) * batch.advantages_BT
    return -trajectory_mean(terms_BT, batch)


def dppo(batch: Padded, *, kind: str, most: float) -> Tensor:
    """DPPO, arXiv 2602.04879: the ratio's gradient, but of tokens pushed on whose divergence is beyond the bound."""
    pi_BT, mu_BT = batch.policy_BT.detach().exp(), batch.old_BT.exp()
    kl_BT = mu_BT * (mu_BT / pi_BT).log() + (1 - mu_BT) * ((1 - mu_BT) / (1 - pi_BT)).log()
    is_far_BT = ((pi_BT - mu_BT).abs() if kind == "tv" else kl_BT) > most
    keep_BT = ~(is_far_BT & (batch.advantages_BT * (pi_BT - mu_BT) > 0))
    weight_BT = (pi_BT / mu_BT).clamp(max=20)
    terms_BT = torch.where(keep_BT & (batch.mask_BT > 0), weight_BT * batch.advantages_BT * batch.policy_BT, 0.0)
    return -token_mean(terms_BT, batch)


# --- the algorithms --------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What an algorithm is compared with."""

    advantages: Advantages
    loss: Callable[[Padded], Tensor]
    is_of_trl: bool
    credit: dict[str, Any] | None = None
    """Scheme that the recipe names. None: none, so that it is the algorithm's."""


def of_trl(advantages: Advantages, loss_type: str, **settings: Any) -> Reference:
    return Reference(advantages, partial(trl_loss, loss_type=loss_type, **settings), is_of_trl=True)


def of_equations(advantages: Advantages, loss: Callable[..., Tensor], **settings: Any) -> Reference:
    return Reference(advantages, partial(loss, **settings), is_of_trl=False)


STD, PLAIN = partial(compared, kind="std"), partial(compared, kind="none")
BY_TURN = {"scheme": "turn_gae"}
"""Advantages that differ within a trajectory, for algorithms that take those of any scheme."""
REFERENCES: dict[str, Reference] = {
    "gspo": of_trl(STD, "grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "gspo_token": of_equations(generalized, gspo_token)._replace(credit=BY_TURN),
    "gspo_hybrid": of_equations(generalized, gspo_hybrid)._replace(credit=BY_TURN),
    "grpo": of_trl(STD, "grpo"),
    "dr_grpo": of_trl(PLAIN, "dr_grpo", max_completion_length=LONGEST),
    "dapo": of_trl(STD, "dapo", epsilon_high=0.28),
    "bnpo": of_trl(STD, "bnpo"),
    "luspo": of_trl(STD, "luspo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "vespo": of_trl(STD, "vespo"),
    "gmpo": Reference(STD, partial(gmpo_loss, epsilon_low=0.4, epsilon_high=0.4), is_of_trl=True),
    "cispo": of_trl(STD, "cispo", epsilon_high=5.0),
    "sapo": of_trl(STD, "sapo"),
    "dppo_tv": of_equations(STD, dppo, kind="tv", most=0.15),
    "dppo_kl": of_equations(STD, dppo, kind="kl", most=0.05),
    "reinforce": of_equations(PLAIN, score_function, mean=by_constant),
    "rloo": of_equations(partial(compared, kind="leave_one_out"), score_function, mean=by_constant),
    "reinforce_plus_plus": of_equations(
        partial(compared, kind="batch"), clipped_surrogate, mean=token_mean, low=0.2, high=0.2
    ),
    "ppo": of_equations(generalized, clipped_surrogate, mean=token_mean, low=0.2, high=0.2),
}
NEVER_LEAVES = {"vespo", "cispo", "sapo", "reinforce", "rloo"}


def test_every_algorithm_has_a_reference() -> None:
    assert REFERENCES.keys() == algorithms().keys()


class Found(NamedTuple):
    """What a loss is, at the tokens of a padded batch."""

    loss: Tensor
    gradient_BT: Tensor
    of_entropy_BT: Tensor
    clipped_BT: Tensor


def ours(batch: Padded, credits: Sequence[Credit], config: LossConfig) -> Found:
    """The loss of a recipe; the anchor's log-probabilities are `old_BT`."""
    columns = make_batch(
        sampled().trajectories,
        credits,
        unit=config.unit,
        aggregation=config.aggregation,
        constant_length=config.constant_length,
    ).columns
    is_token_BT = batch.mask_BT > 0
    policy_BT, entropy_BT = batch.policy_BT.clone().requires_grad_(), batch.entropy_BT.clone().requires_grad_()
    observations = Observations()
    loss = micro_batch_loss(
        policy_BT[is_token_BT],
        columns,
        config=config,
        observations=observations,
        trust=trust_region(config, columns, calibration=Calibration(), version=0),
        anchor=AnchorState() if config.anchor == "behavior" else AnchorState(batch.old_BT[is_token_BT]),
        version=0,
        reference_logprobs_T=batch.reference_BT[is_token_BT] if config.kl_coefficient else None,
        entropy_T=entropy_BT[is_token_BT] if config.entropy_coefficient else None,
    )
    clipped_BT = torch.zeros_like(is_token_BT)
    clipped_BT[is_token_BT] = torch.from_numpy(observations.column("clipped_T") > 0)
    gradient_BT, of_entropy_BT = gradients(loss, policy_BT, entropy_BT)
    return Found(loss.detach(), gradient_BT, of_entropy_BT, clipped_BT)


def theirs(batch: Padded, loss: Callable[[Padded], Tensor]) -> Found:
    leaves = batch.policy_BT.clone().requires_grad_(), batch.entropy_BT.clone().requires_grad_()
    found = loss(replace(batch, policy_BT=leaves[0], entropy_BT=leaves[1]))
    gradient_BT, of_entropy_BT = gradients(found, *leaves)
    # The gradient of a token that has left is zero, and of no other that has an advantage.
    clipped_BT = (batch.mask_BT > 0) & (batch.advantages_BT != 0) & (gradient_BT == 0)
    return Found(found.detach(), gradient_BT, of_entropy_BT, clipped_BT)


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return tuple(torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True))


def by_token(advantages: list[list[float]]) -> Tensor:
    """Repeat the advantages of turns at their tokens."""
    lengths = [[len(turn.action_ids) for turn in member.turns] for member in sampled().trajectories]
    return padded([np.repeat(a, n).tolist() for a, n in zip(advantages, lengths, strict=True)])


def assert_alike(got: Found, expected: Found) -> None:
    for one, other in zip(got[:3], expected[:3], strict=True):
        close(one, other, rtol=1e-9)  # the references add up in another order
    assert torch.equal(got.clipped_BT, expected.clipped_BT)


def needs_trl(name: str) -> Any:
    skipped = pytest.mark.skipif(not is_installed(), reason="TRL, whose losses are the reference, is not installed")
    return pytest.param(name, marks=skipped if REFERENCES[name].is_of_trl else ())


@pytest.mark.parametrize("name", [*map(needs_trl, REFERENCES)])
def test_an_algorithm_has_the_advantages_loss_gradient_and_decisions_of_its_reference(name: str) -> None:
    reference, (groups, batch) = REFERENCES[name], sampled()
    recipe = load_recipe(
        {
            "loss": name,
            "rollout": {"max_episode_tokens": LONGEST, "max_turn_tokens": 8},
            "credit": reference.credit or {},
        }
    )
    credits = list(chain(*assign_credit(load_credit(recipe.credit), groups)))
    found = [credit.advantages_T.tolist() for credit in credits]  # float32
    close(padded(found), by_token(reference.advantages(groups)), rtol=1e-6)
    batch = replace(batch, advantages_BT=padded(found), old_BT=batch.behavior_BT)
    got = ours(batch, credits, recipe.loss)
    assert_alike(got, theirs(batch, reference.loss))
    for is_pushed_BT in (batch.advantages_BT > 0, batch.advantages_BT < 0):
        left = (got.clipped_BT & is_pushed_BT).sum() / is_pushed_BT.sum()
        assert left == 0 if name in NEVER_LEAVES else 0.03 < left < 0.97


BY_SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
CORRECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "KL divergence": (
        {"algorithm": "grpo", "kl_coefficient": 0.3, "kl_estimator": "k3"},
        {"beta": 0.3},
    ),
    "KL divergence beside the ratio of a trajectory": (
        {"algorithm": "gspo", "kl_coefficient": 0.3, "kl_estimator": "k3"},
        {"beta": 0.3, **BY_SEQUENCE},
    ),
    "unbiased KL divergence": (
        {"algorithm": "dapo", "kl_coefficient": 0.3, "kl_estimator": "unbiased", "anchor": "recomputed"},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "off-policy mask": ({"algorithm": "grpo", "off_policy_limit": 0.2}, {"off_policy_mask_threshold": 0.2}),
    "off-policy mask by the engine, and KL divergence": (
        {
            "algorithm": "gspo",
            "off_policy_limit": 0.2,
            "anchor": "recomputed",
            "kl_coefficient": 0.1,
            "kl_estimator": "k3",
        },
        {"off_policy_mask_threshold": 0.2, "beta": 0.1, **BY_SEQUENCE},
    ),
    "entropy": ({"algorithm": "bnpo", "entropy_coefficient": 0.3}, {"loss_type": "bnpo", "entropy_coef": 0.3}),
    **{
        f"{level} {mode} of {name}": (
            {
                "algorithm": name,
                "anchor": "recomputed",
                "mismatch": mode,
                "mismatch_limit": 1.2,
                "mismatch_level": {"token": "token", "sequence": "product"}[level],
            },
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": f"{level}_{mode}",
                "vllm_importance_sampling_clip_max": 1.2,
                "vllm_importance_sampling_clip_min": 1 / 1.2 if mode == "mask" else None,
                **(BY_SEQUENCE if name == "gspo" else {}),
            },
        )
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
        for name in ("gspo", "grpo")
    },
}


@pytest.mark.skipif(not is_installed(), reason="TRL, whose losses are the reference, is not installed")
@each("name", CORRECTIONS)
def test_a_correction_is_trls(name: str) -> None:
    fields, settings = CORRECTIONS[name]
    groups, batch = sampled()
    config = LossConfig.model_validate(fields)
    credits = list(chain(*assign_credit(load_credit({"scheme": "uniform"}), groups)))
    batch = replace(batch, advantages_BT=padded([credit.advantages_T.tolist() for credit in credits]))
    if config.anchor == "behavior":
        batch = replace(batch, old_BT=batch.behavior_BT)
    got, expected = ours(batch, credits, config), theirs(batch, partial(trl_loss, **settings))
    close(got.loss, expected.loss, rtol=1e-9)
    close(got.of_entropy_BT, expected.of_entropy_BT, rtol=1e-9)
    gradients_BT = got.gradient_BT, expected.gradient_BT
    if name.startswith("token ") and name.endswith("gspo"):
        # A weight is that of its token, as an advantage is (GSPO-token); through TRL's mean it is shared by all.
        gradients_BT = gradients_BT[0].sum(1), gradients_BT[1].sum(1)
    close(*gradients_BT, rtol=1e-9)
    # It is not the loss without the correction, in tokens of either sign.
    plain = ours(batch, credits, LossConfig(algorithm=config.algorithm, anchor=config.anchor))
    changed_BT = (got.gradient_BT - plain.gradient_BT).abs() + (got.of_entropy_BT - plain.of_entropy_BT).abs() > 1e-6
    assert (changed_BT & (batch.advantages_BT < 0)).any()
    assert (changed_BT & (batch.advantages_BT > 0)).any() == (name != "off-policy mask")


def test_the_tokens_have_moved_as_far_as_the_references_tell_apart() -> None:
    batch = sampled().padded
    moved_BT = (batch.policy_BT - batch.behavior_BT) * batch.mask_BT
    assert (moved_BT.exp() > 5).any()  # CISPO
    assert moved_BT.sum(1).abs().max() < 18  # TRL bounds the product of VESPO there, ours at 80
    assert len(set(batch.mask_BT.sum(1).tolist())) > 5
    assert batch.mask_BT.sum(1).max() < LONGEST
