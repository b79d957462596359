"""The sections `loss` and `train` of a recipe: ranges, names of algorithms, contradictions, words."""

import math

import pytest
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.tokens import RatioUnit
from tests.support.each import each
from tests.support.ratio_batches import UNITS


@each(
    ("unit", "expected"),
    [
        ("trajectory", (3e-4, 4e-4)),
        ("turn", (3e-3, 4e-3)),
        ("version", (3e-3, 4e-3)),
        ("token", (0.2, 0.27)),
    ],
)
def test_the_clip_range_follows_the_unit_and_its_own_default_gets_no_warning(
    unit: RatioUnit, expected: tuple[float, float]
) -> None:
    assert LossConfig(trust="fixed", unit=unit).clip_range() == expected
    explicit = LossConfig(trust="fixed", unit=unit, clip_low=expected[0], clip_high=expected[1])
    assert explicit.warnings() == LossConfig(trust="fixed", unit=unit).warnings() == []
    assert LossConfig(trust="fixed", unit=unit, clip_low=0.01).clip_range() == (0.01, expected[1])
    assert LossConfig(trust="fixed", unit=unit, clip_high=0.01).clip_range() == (expected[0], 0.01)


@each(
    ("config", "message"),
    [
        (
            LossConfig(trust="fixed", unit="token", clip_low=3e-4),
            "clip_low: 0.0003 is a range for unit: trajectory, but unit is token",
        ),
        (LossConfig(trust="fixed", unit="trajectory", clip_high=0.2), "clip_high: 0.2 is a range for unit: token"),
        (
            LossConfig(trust="fixed", unit="trajectory", clip_high=4e-3),
            "clip_high: 0.004 is a range for unit: turn or version",
        ),
        (
            LossConfig(trust="fixed", unit="version", clip_low=0.2),
            "but unit is version, whose ratios call for about 0.003",
        ),
    ],
)
def test_another_units_clip_range_gets_a_warning(config: LossConfig, message: str) -> None:
    (warning,) = config.warnings()
    assert message in warning


def test_a_bound_short_of_another_units_gets_no_warning() -> None:
    assert LossConfig(trust="fixed", unit="trajectory", clip_low=2e-3, clip_high=2.7e-3).warnings() == []
    assert LossConfig(trust="fixed", unit="token", clip_low=0.01, clip_high=0.01).warnings() == []


def test_by_default_a_trajectory_leaves_by_its_ratio() -> None:
    config = LossConfig()
    assert (config.algorithm, config.unit, config.trust, config.aggregation) == (
        "gspo_token",
        "trajectory",
        "fixed",
        "trajectory-mean",
    )
    assert (config.clip_range(), config.warnings()) == ((3e-4, 4e-4), [])


def test_ranges_of_tokens_are_those_of_tokens_whatever_the_unit() -> None:
    for unit in UNITS:
        config = LossConfig(unit=unit, trust="token")
        assert (config.clip_range(), config.warnings()) == ((0.2, 0.27), [])
    (warning,) = LossConfig(trust="token", clip_high=2.7e-3).warnings()
    assert "trust: token looks at tokens" in warning
    assert "set trust: fixed" in warning


def test_both_bounds_of_another_unit_get_a_warning_each() -> None:
    assert len(LossConfig(unit="token", clip_low=3e-4, clip_high=4e-4).warnings()) == 2


@each(
    ("fields", "message"),
    [
        ({"aggregation": "constant"}, "aggregation: constant needs constant_length"),
        ({"constant_length": 100}, "constant_length: 100 is only used by aggregation: constant"),
        ({"aggregation": "constant", "constant_length": 0}, "constant_length\n.*greater than 0"),
        ({"clip_low": 0}, "clip_low\n.*greater than 0"),
        ({"clip_low": 1.5}, "clip_low\n.*less than or equal to 1"),
        ({"clip_high": -0.1}, "clip_high\n.*greater than 0"),
        ({"clip_high": math.inf}, "clip_high\n.*finite"),
        ({"kl_coefficient": -1}, "kl_coefficient\n.*greater than or equal to 0"),
        ({"unit": "sequence"}, "unit\n.*'trajectory', 'turn', 'version' or 'token'"),
        ({"anchor": "old"}, "anchor\n.*'behavior', 'recomputed' or 'sampled'"),
        ({"kept_versions": 8}, "kept_versions: 8 is only used by anchor: sampled; remove it"),
        ({"anchor": "recomputed", "kept_versions": 8}, "kept_versions: 8 is only used by anchor: sampled"),
        ({"anchor": "recomputed", "mismatch_limit": 3}, "mismatch_limit: 3 is only used by mismatch: truncate or mask"),
        (
            {"anchor": "recomputed", "mismatch_level": "token"},
            "mismatch_level: token is only used by mismatch: truncate",
        ),
        ({"kl_estimator": "k3"}, "kl_estimator: k3 is only used by kl_coefficient above 0"),
        ({"trust": "none", "clip_low": 0.2}, "clip_low and clip_high: trust: none has no range"),
        ({"trust": "kernel", "clip_high": 0.2}, "clip_low and clip_high: trust: kernel has no range"),
        ({"gate": {}}, "gate: is only used by trust: gate, got trust: fixed"),
        ({"trust": "gate", "kernel": {}}, "kernel: is only used by trust: kernel, got trust: gate"),
        (
            {"trust": "token", "clip_by_length": 8},
            "clip_by_length: 8 is only used by trust: fixed with a unit of several",
        ),
        ({"unit": "token", "clip_by_length": 8}, "got trust: fixed and unit: token"),
        ({"off_policy_limit": 0}, "off_policy_limit\n.*greater than 0"),
        ({"entropy_coefficient": math.inf}, "entropy_coefficient\n.*finite"),
        ({"algorithm": "gpso"}, "there is no 'gpso'; `agentrl algorithms` lists them. Did you mean 'gspo'"),
        ({"temperature": 1.0}, "temperature\n.*not permitted"),
    ],
)
def test_contradictions_and_unknown_fields_are_errors(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig.model_validate(fields)


def test_the_defaults_of_unused_fields_may_be_written_out() -> None:
    for config in (LossConfig(), LossConfig(anchor="sampled", kept_versions=8)):
        assert LossConfig.model_validate(config.model_dump()) == config


def test_fewer_kept_versions_than_tokens_are_old_are_told() -> None:
    config = LossConfig(anchor="sampled")  # of four versions before the present one
    assert config.warnings(staleness_bound=4) == LossConfig().warnings(staleness_bound=9) == []
    (words,) = config.warnings(staleness_bound=5)
    assert words.startswith("loss.kept_versions: 4 is too few for rollout.max_staleness: 5: older tokens")
    assert "set it to 5" in words


@each(
    ("fields", "words"),
    [
        ("gspo_token", "gspo_token: one ratio per trajectory, clip [0.9997, 1.0004], trajectory-mean"),
        (
            {"clip_by_length": 2000},
            "gspo_token: one ratio per trajectory, clip [0.9997, 1.0004] at 2000 tokens, trajectory-mean",
        ),
        ({"trust": "token"}, "gspo_token: one ratio per trajectory, token-level clip [0.8, 1.27], trajectory-mean"),
        ({"unit": "token", "trust": "token"}, "gspo_token: token ratios, clip [0.8, 1.27], trajectory-mean"),
        ({"unit": "turn"}, "gspo_token: turn ratios, clip [0.997, 1.004], trajectory-mean"),
        ("grpo", "grpo: token ratios, clip [0.8, 1.2], trajectory-mean"),
        ("dapo", "dapo: token ratios, clip [0.8, 1.28], token-mean"),
        ("gmpo", "gmpo: one ratio per trajectory, of ratios clipped to [0.6703, 1.492], trajectory-mean"),
        ("cispo", "cispo: token ratios, ratio within [0, 5], token-mean"),
        ("sapo", "sapo: token ratios, soft gate, trajectory-mean"),
        ("vespo", "vespo: one ratio per trajectory, VESPO kernel, token-mean"),
        ("dppo_tv", "dppo_tv: token ratios, total variation up to 0.15 and 0.15, token-mean"),
        ("dppo_kl", "dppo_kl: token ratios, divergence up to 0.05 and 0.05, token-mean"),
        ({"algorithm": "rloo", "constant_length": 9}, "rloo: no ratio and no clip, constant"),
        (
            {"trust": "calibrated", "calibrated": {"clipped": 0.001}},
            "gspo_token: one ratio per trajectory, calibrated clip of 0.1 % of tokens, trajectory-mean",
        ),
    ],
)
def test_a_loss_is_described_in_the_words_of_the_field(fields: object, words: str) -> None:
    assert LossConfig.model_validate(fields).describe() == words


def test_a_field_beside_the_name_overrides_and_takes_its_range_along() -> None:
    grpo = LossConfig.model_validate({"algorithm": "grpo", "clip_high": 0.28})
    assert (grpo.unit, grpo.trust, grpo.clip_range()) == ("token", "fixed", (0.2, 0.28))
    # The preset's range is that of its unit and region: with others, theirs.
    assert LossConfig.model_validate({"algorithm": "dapo", "unit": "turn"}).clip_range() == (3e-3, 4e-3)
    assert LossConfig.model_validate({"algorithm": "dapo", "trust": "tv"}).clip_range() == (0.15, 0.15)
    luspo = LossConfig.model_validate({"algorithm": "luspo", "aggregation": "token-mean"})
    assert (luspo.aggregation, luspo.constant_length) == ("token-mean", None)
    with pytest.raises(ValidationError, match="constant needs constant_length"):
        LossConfig.model_validate("dr_grpo")  # a recipe fills it in


def test_a_constant_length_goes_with_its_aggregation() -> None:
    assert LossConfig(aggregation="constant", constant_length=100).constant_length == 100


def test_weights_are_sharded_over_the_ranks_of_a_replica() -> None:
    train = TrainConfig(sharding="full", replicas=2)
    assert [train.num_shards(ranks) for ranks in (1, 4, 16)] == [1, 2, 8]
    assert [train.is_sharded(ranks) for ranks in (1, 4)] == [False, True]
    assert [TrainConfig(sharding="full").num_shards(3), TrainConfig().num_shards(4)] == [3, 1]


@each("ranks", [2, 3])
def test_replicas_that_leave_a_rank_over_or_nothing_to_shard_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"^train.replicas: 2 groups of at least 2 ranks cannot be made of {ranks};"):
        TrainConfig(sharding="full", replicas=2).num_shards(ranks)


def test_replicas_of_whole_weights_are_refused() -> None:
    with pytest.raises(ValidationError, match="replicas: 2 are of shards; set sharding: full"):
        TrainConfig(replicas=2)
