"""Terms of the loss beside the policy's: covariance rules, imitation, distillation, and the divergence in the reward.

Pure functions against plain loops, and each term in a real training pass against autograd over single trajectories.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl import Credit, Trajectory, TrajectoryGroup
from agentrl.errors import ConfigError
from agentrl.learn.config import LossConfig
from agentrl.learn.learner import CreditedMinibatch, Learner
from agentrl.learn.loss import covariance_penalty, nll_loss, select_by_covariance
from agentrl.learn.metrics import update_metrics
from agentrl.learn.rewarding import kl_metrics, subtract_kl
from agentrl.types import StopReason
from tests.support.each import each
from tests.support.hugging_face import hugging_face_folder
from tests.support.learners import make_learner
from tests.support.ratio_batches import close, f64
from tests.support.run_files import repeatable
from tests.support.runs import recipe, train
from tests.support.trajectories import some_demonstrations, some_groups

RNG = np.random.default_rng(3)


def drawn(num: int) -> Tensor:
    return torch.from_numpy(RNG.normal(size=num))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- pure functions


def test_imitation_is_the_weighed_negative_log_likelihood() -> None:
    logprobs_T, weight_T = f64(-1.0, -2.0, -4.0).requires_grad_(), f64(0.5, 0.0, 0.25)
    loss = nll_loss(logprobs_T, weight_T=weight_T, coefficient=0.2)
    assert loss.item() == pytest.approx(0.2 * (0.5 * 1 + 0.25 * 4), rel=1e-12)
    close(torch.autograd.grad(loss, logprobs_T)[0], f64(-0.1, 0.0, -0.05))
    with pytest.raises(ValueError, match="coefficient >= 0, got -1"):
        nll_loss(logprobs_T, weight_T=weight_T, coefficient=-1)


def test_the_penalty_pulls_selected_tokens_to_the_anchor_from_either_side() -> None:
    logprobs_T, anchor_T = f64(-1.0, -2.0, -3.0, -4.0).requires_grad_(), f64(-1.5, -1.0, -3.0, -9.0)
    loss = covariance_penalty(
        logprobs_T,
        anchor_logprobs_T=anchor_T,
        weight_T=f64(0.1, 0.2, 0.3, 0.4),
        selected_T=torch.tensor([True, True, True, False]),
        coefficient=2.0,
    )
    assert loss.item() == pytest.approx(2 * (0.1 * 0.5 + 0.2 * 1.0), rel=1e-12)
    close(torch.autograd.grad(loss, logprobs_T)[0], f64(0.2, -0.4, 0.0, 0.0))


def covariances(advantages_T: Tensor, logprobs_T: Tensor) -> list[float]:
    num = len(advantages_T)
    means = [sum(column.tolist()) / num for column in (advantages_T, logprobs_T)]
    pairs = zip(advantages_T.tolist(), logprobs_T.tolist(), strict=True)
    return [(advantage - means[0]) * (logprob - means[1]) for advantage, logprob in pairs]


def test_kl_cov_selects_the_tokens_of_the_highest_covariance() -> None:
    advantages_T, logprobs_T = drawn(50), drawn(50) - 3
    found = covariances(advantages_T, logprobs_T)
    best = sorted(range(50), key=lambda t: -found[t])
    for share, num in ((0.1, 5), (0.099, 4), (1e-6, 1), (1.0, 50)):
        selected_T = select_by_covariance(
            advantages_T, logprobs_T, rule="kl", share=share, band=(1.0, 5.0), generator=generator()
        )
        assert selected_T.nonzero().flatten().tolist() == sorted(best[:num])


def test_clip_cov_draws_from_the_band_by_its_seed() -> None:
    advantages_T, logprobs_T = drawn(400), drawn(400) - 3

    def chosen(seed: int, share: float = 0.05) -> set[int]:
        selected_T = select_by_covariance(
            advantages_T, logprobs_T, rule="clip", share=share, band=(0.2, 1.0), generator=generator(seed)
        )
        return set(selected_T.nonzero().flatten().tolist())

    within = {t for t, value in enumerate(covariances(advantages_T, logprobs_T)) if 0.2 < value < 1.0}
    assert len(within) > 30
    assert len(chosen(0)) == 20
    assert chosen(0) <= within
    assert chosen(0) == chosen(0) != chosen(1)
    assert set().union(*map(chosen, range(40))) == within
    assert chosen(0, share=1.0) == within  # fewer than were asked for


def test_no_token_is_selected_from_none_and_shares_are_checked() -> None:
    none_T = f64()
    selected_T = select_by_covariance(none_T, none_T, rule="kl", share=0.5, band=(1, 5), generator=generator())
    assert selected_T.tolist() == []
    with pytest.raises(ValueError, match="share above 0 and at most 1, got 0"):
        select_by_covariance(none_T, none_T, rule="kl", share=0, band=(1, 5), generator=generator())


# --- a real training pass


def prepared_groups() -> list[TrajectoryGroup]:
    """Groups with a teacher's log-probabilities, every other of whose episodes succeeds."""
    found = []
    for group in some_groups([3, 3], seed=4):
        members = [
            replace(
                t,
                metrics={"success": float(number % 2 == 0)},
                turns=tuple(
                    replace(
                        turn,
                        signals={
                            "teacher_logprobs": tuple((RNG.normal(size=len(turn.action_ids)) - 5).tolist()),
                            "reference_logprobs": tuple((RNG.normal(size=len(turn.action_ids)) - 5).tolist()),
                        },
                    )
                    for turn in t.turns
                ),
            )
            for number, t in enumerate(group.trajectories)
        ]
        found.append(replace(group, trajectories=tuple(members)))
    return found


GROUPS = prepared_groups()
CREDITS = [[Credit.from_tokens(t, RNG.normal(size=t.num_action_tokens)) for t in g.trajectories] for g in GROUPS]
DEMONSTRATIONS = some_demonstrations(5)
BASE: dict[str, Any] = {"unit": "token", "trust": "none", "aggregation": "trajectory-mean"}
CLIP = {"rule": "clip", "share": 0.2, "band": [0.0, 9.0]}
KL = {"rule": "kl", "share": 0.3, "coefficient": 0.7}
TERMS: dict[str, dict[str, Any]] = {
    "Clip-Cov": {"covariance": CLIP},
    "KL-Cov": {"covariance": KL},
    "successes": {"nll": {"coefficient": 0.3}},
    "demonstrations": {"nll": {"coefficient": 0.3, "of": "demonstrations", "batch_size": 3}},
    "teacher": {"distill_coefficient": 0.4},
}


def learner_for(**loss: Any) -> Learner:
    learner = make_learner(loss=LossConfig(**BASE, **loss), is_double=True, num_minibatches=1, max_grad_norm=1e9)
    learner.demonstrations = DEMONSTRATIONS
    return learner


class Measured:
    """Loss, gradient and metrics of the only minibatch of a step."""

    def __init__(self, loss: Mapping[str, Any], *, max_tokens: int = 10**6) -> None:
        self.learner = learner_for(**loss)
        self.learner._planner = replace(self.learner._planner, max_tokens=max_tokens)
        (self.minibatch,) = self.learner.draw(GROUPS, CREDITS, version=1)
        passes, demonstrations = self.learner.plan(self.minibatch), self.learner.plan_demonstrations(self.minibatch)
        self.num_passes = len(passes) + len(demonstrations)
        (anchors,) = self.learner._anchor_states([self.minibatch], [passes], version=1)
        found = self.learner.add_gradients(passes, anchors, version=1, demonstrations=demonstrations)
        self.loss = found.stats.loss
        self.metrics = update_metrics([found.stats], current_version=1)
        self.columns = passes[0].columns if len(passes) == 1 else None
        self.gradient = gradient_of(self.learner)


def gradient_of(learner: Learner) -> Tensor:
    parameters = learner.state.policy.parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def logprobs_of(learner: Learner, turns: Sequence[Any]) -> list[Tensor]:
    """The policy's log-probability of every action token, turn by turn in its own context, with a gradient."""
    ids, found = list[int](), []
    for turn in turns:
        ids = [*(ids if turn.extends else ()), *turn.observation_ids]
        start = len(ids)
        ids += turn.action_ids
        table = learner.state.policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found += [table[start + j - 1, token] for j, token in enumerate(turn.action_ids)]
    return found


def tokens_of(minibatch: CreditedMinibatch) -> Iterator[tuple[Trajectory, int, float, float]]:
    """Trajectory, place in it, advantage and behavior log-probability of each token of a minibatch."""
    for t, credit in minibatch.pairs:
        behavior = [x for turn in t.turns for x in turn.behavior_logprobs]
        for place, (advantage, logprob) in enumerate(zip(credit.advantages_T.tolist(), behavior, strict=True)):
            yield t, place, advantage, logprob


def plain_term(name: str, measured: Measured) -> Tensor:
    """The term that a recipe adds to the loss, from its equation, with a gradient."""
    learner, minibatch = measured.learner, measured.minibatch
    everyone = [t for t, _ in minibatch.pairs]
    term = torch.zeros((), dtype=torch.float64)
    if name == "demonstrations":
        rng = np.random.default_rng(minibatch.seed)
        for index in rng.choice(len(DEMONSTRATIONS), size=3, replace=False):
            logprobs = logprobs_of(learner, DEMONSTRATIONS[index].turns)
            term = term - 0.3 * sum(logprobs) / len(logprobs) / 3
        return term
    if name == "successes":
        successes = [t for t in everyone if t.metrics["success"]]
        for t in successes:
            logprobs = logprobs_of(learner, t.turns)
            term = term - 0.3 * sum(logprobs) / len(logprobs) / len(successes)
        return term
    tokens = list(tokens_of(minibatch))
    found = covariances(f64(*(token[2] for token in tokens)), f64(*(token[3] for token in tokens)))
    best = sorted(range(len(tokens)), key=lambda t: -found[t])[: int(0.3 * len(tokens))]
    own = {t.trajectory_id: logprobs_of(learner, t.turns) for t in everyone}
    teacher = {t.trajectory_id: [x for turn in t.turns for x in turn.signals["teacher_logprobs"]] for t in everyone}
    for number, (t, place, advantage, behavior) in enumerate(tokens):
        logprob = own[t.trajectory_id][place]
        weight = 1 / len(everyone) / t.num_action_tokens
        if name == "teacher":
            term = term + 0.4 * weight * (logprob - teacher[t.trajectory_id][place]) ** 2 / 2
        elif name == "KL-Cov" and number in best:
            term = term + 0.7 * weight * (logprob - behavior).abs()
        elif name == "Clip-Cov" and measured.columns is not None:
            assert measured.columns.selected_T is not None
            if measured.columns.selected_T[number]:
                assert 0 < found[number] < 9
                term = term + weight * advantage * logprob  # takes back what the policy loss gives to it
    return term


@pytest.mark.slow
@each("name", TERMS)
def test_a_term_adds_its_gradient_and_no_split_changes_it(name: str) -> None:
    plain, whole, split = Measured({}), Measured(TERMS[name]), Measured(TERMS[name], max_tokens=1)
    assert whole.num_passes < split.num_passes
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=1e-9, atol=1e-12)
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    whole.learner.state.optimizer.zero_grad()
    term = plain_term(name, whole)
    term.backward()
    added = gradient_of(whole.learner)
    assert added.norm() > 1e-3
    torch.testing.assert_close(whole.gradient - plain.gradient, added, rtol=1e-6, atol=1e-9)
    if name != "Clip-Cov":  # where the value of the policy loss, without a ratio, is that of the advantages
        assert whole.loss - plain.loss == pytest.approx(term.item(), rel=1e-9)


def test_every_token_may_have_a_gradient_where_a_term_has_one() -> None:
    """A trajectory without an advantage is computed if a term of the loss gives it a gradient."""
    zero = [[Credit.uniform(t, 0.0) for t in group.trajectories] for group in GROUPS]
    computed = {
        name: sum(minibatch.num_computed for minibatch in learner_for(**term).draw(GROUPS, zero, version=1))
        for name, term in TERMS.items()
    }
    assert computed == {"Clip-Cov": 1, "KL-Cov": 6, "successes": 4, "demonstrations": 1, "teacher": 6}


def test_metrics_of_the_terms() -> None:
    """Means over the tokens that each concerns."""
    imitated, shown = Measured(TERMS["successes"]), Measured(TERMS["demonstrations"], max_tokens=1)
    clipped, taught = Measured(TERMS["Clip-Cov"]), Measured(TERMS["teacher"])
    with torch.no_grad():
        successes = [t for t, _ in imitated.minibatch.pairs if t.metrics["success"]]
        logprobs = [float(x) for t in successes for x in logprobs_of(imitated.learner, t.turns)]
        assert imitated.metrics["nll"] == pytest.approx(-np.mean(logprobs), rel=1e-9)
        every = [float(x) for t, _ in taught.minibatch.pairs for x in logprobs_of(taught.learner, t.turns)]
    teacher = [x for t, _ in taught.minibatch.pairs for turn in t.turns for x in turn.signals["teacher_logprobs"]]
    assert taught.metrics["kl/teacher"] == pytest.approx(np.mean(every) - np.mean(teacher), rel=1e-9)
    assert shown.metrics["nll"] == pytest.approx(math.log(261), rel=0.05)  # of a policy that was never trained
    assert clipped.metrics["clip/covariance_tokens"] == int(0.2 * len(every)) / len(every)
    assert {"nll", "kl/teacher", "clip/covariance_tokens"}.isdisjoint(Measured({}).metrics)


def test_a_minibatch_without_an_advantage_still_learns_from_demonstrations() -> None:
    learner = learner_for(**TERMS["demonstrations"])
    metrics = learner.update([], [], version=1)
    assert metrics["skipped_minibatches"] == 0
    assert metrics["grad_norm"] > 0
    assert metrics["nll"] == pytest.approx(math.log(261), rel=0.05)
    assert learner_for().update([], [], version=1)["skipped_minibatches"] == 1


def test_a_learner_says_what_a_term_lacks() -> None:
    learner = learner_for(**TERMS["demonstrations"])
    learner.demonstrations = ()
    with pytest.raises(ConfigError, match=r"loss\.nll: of: demonstrations, and Learner\.demonstrations is empty"):
        learner.update(GROUPS, CREDITS, version=1)
    unmeasured = some_groups([2])
    credits = [[Credit.uniform(t, 1.0) for t in unmeasured[0].trajectories]]
    with pytest.raises(ConfigError, match="loss: it reads teacher_logprobs, which turns do not have"):
        learner_for(**TERMS["teacher"]).update(unmeasured, credits, version=1)


# --- the divergence in the reward


def test_rewards_lose_the_divergence_of_each_turn() -> None:
    group = GROUPS[0]
    lost = replace(group.trajectories[0], trajectory_id="lost", stop_reason=StopReason.ENV_ERROR, turns=())
    given = replace(group, trajectories=(lost, *group.trajectories))
    (found,) = subtract_kl([given], coefficient=0.5)
    assert found.trajectories[0] is lost
    ratios = []
    for got, t in zip(found.trajectories[1:], group.trajectories, strict=True):
        for after, turn in zip(got.turns, t.turns, strict=True):
            pairs = list(zip(turn.behavior_logprobs, turn.signals["reference_logprobs"], strict=True))
            ratios += [behavior - reference for behavior, reference in pairs]
            assert after.reward == pytest.approx(turn.reward - 0.5 * sum(ratios[-len(pairs) :]), rel=1e-12)
            assert replace(after, reward=turn.reward) == turn
    assert kl_metrics([given]) == pytest.approx({"kl/reference": np.mean(ratios)}, rel=1e-12)
    assert kl_metrics([]) == {}
    with pytest.raises(ConfigError, match=r"loss\.kl_estimator: k1_reward, and turns have no reference_logprobs"):
        subtract_kl(some_groups([2]), coefficient=0.5)


K1 = {"kl_coefficient": 0.1, "kl_estimator": "k1_reward"}


@each(
    ("sections", "words"),
    [
        (
            {"loss": K1, "credit": {"scheme": "distill", "teacher": "reference"}},
            r"loss\.kl_estimator: k1_reward is part of the rewards, and 'distill' reads no rewards; set it to k2",
        ),
        (
            {"loss": K1, "credit": {"scheme": "tree"}},
            r"'tree' compares with what forks earned",
        ),
        ({"loss": {"distill_coefficient": 0.1}}, r"loss\.distill_coefficient: it needs teacher_logprobs; set signals\.teacher"),
        ({"loss": {"kl_estimator": "k1_reward"}}, r"k1_reward is only used by kl_coefficient above 0"),
        ({"loss": {"covariance": {"rule": "kl", "band": [0, 1]}}}, r"band: .* is only used by rule: clip"),
        ({"loss": {"covariance": {"coefficient": 2}}}, r"coefficient: 2.* is only used by rule: kl"),
        ({"loss": {"covariance": {"band": [3, 1]}}}, r"band: \[3.*, 1.*\] is empty"),
        ({"loss": {"nll": {"batch_size": 3}}}, r"batch_size: 3 is only used by of: demonstrations"),
    ],
)  # fmt: skip
def test_terms_that_cannot_be_had_are_refused(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(recipe(tmp_path, **sections))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.process
def test_a_run_with_all_terms_resumes_bit_for_bit(tmp_path: Path) -> None:
    name = hugging_face_folder(tmp_path / "teacher", rewrites=False)
    loss = {
        "kl_coefficient": 0.1,
        "kl_estimator": "k1_reward",
        "covariance": {"band": [-9, 9], "share": 0.1},
        "nll": {"of": "demonstrations", "batch_size": 2},
        "distill_coefficient": 0.1,
    }
    given: dict[str, Any] = {
        "model": {"name_or_path": name},
        "signals": {"teacher": name},
        "loss": loss,
        "warmup": {"num_demonstrations": 5},
    }
    _, rows = train(recipe(tmp_path, **given, train={"steps": 2}))
    assert {"nll", "kl/teacher", "kl/reference", "clip/covariance_tokens"} <= rows[-1].keys()
    again = recipe(tmp_path, **given, run_dir=tmp_path / "again", train={"steps": 1})
    folder, _ = train(again)
    _, resumed = train(recipe(tmp_path, **given, run_dir=tmp_path / "again", train={"steps": 2}), folder)
    for found, expected in zip(map(repeatable, resumed), map(repeatable, rows), strict=True):
        shared = found.keys() & expected.keys()  # the shorter run evaluated at its end
        assert len(shared) > (50 if found["step"] else 20)
        assert {name: found[name] for name in shared} == {name: expected[name] for name in shared}
