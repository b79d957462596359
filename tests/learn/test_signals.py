"""What a scheme asks for is measured, and nothing else; whole runs with each of the schemes that read signals."""

import asyncio
import copy
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl import load_credit
from agentrl.chat import ChatMLRenderer, HistoryConfig, Renderer
from agentrl.cli import main
from agentrl.env import base_env, make_env
from agentrl.errors import ConfigError, EnvironmentFailure, UserError
from agentrl.learn.signals import SignalsConfig, hints, provided_by, signal_classes
from agentrl.learn.signals.base import SignalContext
from agentrl.learn.signals.hindsight_logprobs import rows_in_hindsight
from agentrl.learn.signals.signals import Signals
from agentrl.policy.model import Policy
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.run import loop
from agentrl.run.build import Parts, build
from agentrl.types import Need, StopReason, Trajectory, TrajectoryGroup, Turn
from agentrl_envs.calculator import Calculator
from agentrl_envs.key_door import KeyDoor
from tests.support.each import each
from tests.support.played import TOKENIZER, asked, contexts, new_policy, plain_pass, plain_passes, play
from tests.support.renderers import OftenStops, StartsAgain
from tests.support.run_files import repeatable
from tests.support.runs import recipe, train
from tests.support.signals import without_signals
from tests.support.tiers import first_quick


def length_judge(trajectory: Trajectory) -> list[float]:
    """Score a turn by its number of tokens."""
    return [len(turn.action_ids) / 8 for turn in trajectory.turns]


def slow_judge(trajectory: Trajectory) -> list[float]:
    time.sleep(0.5)
    return length_judge(trajectory)


class Meeting:
    """A judge whose calls return once as many of them as expected have come together."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.expect(1)

    def expect(self, num: int) -> None:
        self.barrier = threading.Barrier(num)
        self.inside = self.peak = 0

    def __call__(self, trajectory: Trajectory) -> list[float]:
        with self.lock:
            self.inside += 1
            self.peak = max(self.peak, self.inside)
        self.barrier.wait(timeout=60)
        with self.lock:
            self.inside -= 1
        return length_judge(trajectory)


MEETING = Meeting()
JUDGE = f"{__name__}:length_judge"


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def unneeded() -> Policy:
    raise AssertionError("no scheme asked for a teacher")


def new_signals(
    runner: asyncio.Runner,
    credit: dict[str, Any],
    *,
    policy: Policy,
    reference: Policy | None = None,
    load_teacher: Callable[[], Policy] = unneeded,
    renderer: Renderer | None = None,
    env: str = "key_door",
    temperature: float = 1.0,
    **config: Any,
) -> Signals:
    return Signals(
        SignalContext(
            scheme=load_credit(credit),
            config=SignalsConfig(**config),
            policy=policy,
            reference=reference,
            load_teacher=load_teacher,
            renderer=renderer or StartsAgain(TOKENIZER),
            tools=base_env(make_env(env)).tools,
            history=HistoryConfig(),
            temperature=temperature,
            max_tokens=1000,
            is_sharded=False,
            seed=3,
        )
    )


def groups_of(trajectories: list[Trajectory], *, size: int = 2) -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            group_id=f"g{start}",
            trajectories=tuple(replace(t, group_id=f"g{start}") for t in trajectories[start : start + size]),
        )
        for start in range(0, len(trajectories), size)
    ]


@pytest.fixture(scope="module")
def walks() -> list[TrajectoryGroup]:
    """Groups of ragged key_door episodes, some of whose turns begin a new context."""
    return groups_of(play(new_policy(), num=4))


@pytest.fixture(scope="module")
def sums() -> list[TrajectoryGroup]:
    """Groups of calculator episodes, whose answer is known."""
    return groups_of(play(new_policy(), env="calculator", renderer=OftenStops(TOKENIZER), num=4))


def column(trajectory: Trajectory, name: str) -> list[float]:
    return [value for turn in trajectory.turns for value in turn.signals[name]]


def behavior(trajectory: Trajectory) -> list[float]:
    return [logprob for turn in trajectory.turns for logprob in turn.behavior_logprobs]


def restored(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return a group without what was measured."""
    return replace(group, trajectories=tuple(map(without_signals, group.trajectories)))


def test_every_need_is_the_environments_or_a_file_of_its_own() -> None:
    class Rich(KeyDoor):
        """Provides whatever an environment can."""

        def gold_answer(self) -> str:
            return "42"

    assert Rich().provides() | set(signal_classes()) == set(Need)
    assert set(hints()) == {Need.TEACHER_LOGPROBS, Need.TURN_SCORES}
    bare, full = SignalsConfig(), SignalsConfig(teacher="a", judge="b:c")
    assert provided_by(full) - provided_by(bare) == set(hints())
    assert set(signal_classes()) - provided_by(full) == {Need.ANSWER_LOGPROBS}


@each(
    ("credit", "names"),
    [
        ({"scheme": "uniform"}, set()),
        ({"scheme": "gigpo"}, set()),
        ({"scheme": "turn_gae"}, {"values"}),
        ({"scheme": "shuffled", "of": {"scheme": "turn_gae"}}, {"values"}),
        ({"scheme": "distill", "teacher": "reference"}, {"reference_logprobs"}),
        ({"scheme": "distill", "teacher": "model"}, {"teacher_logprobs"}),
        ({"scheme": "distill", "teacher": "hindsight"}, {"hindsight_logprobs"}),
        ({"scheme": "info_gain"}, {"answer_logprobs"}),
        ({"scheme": "judge"}, {"turn_scores"}),
    ],
)
def test_what_a_scheme_asks_for_is_measured_and_nothing_else(
    credit: dict[str, Any], names: set[str], runner: asyncio.Runner, sums: list[TrajectoryGroup]
) -> None:
    needs_teacher = "teacher_logprobs" in names
    signals = new_signals(
        runner,
        credit,
        policy=new_policy(),
        reference=new_policy() if "reference_logprobs" in names else None,
        load_teacher=new_policy if needs_teacher else unneeded,
        renderer=ChatMLRenderer(TOKENIZER),
        env="calculator",
        judge=JUDGE,  # named, and still not asked where no scheme reads its scores
    )
    measured = signals.measure(sums)
    for group in measured:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                assert set(turn.signals) == names
            assert set(trajectory.signals) == names & {"values"}
    assert [restored(group) for group in measured] == sums
    load_credit(credit).assign(measured)  # and is enough


def failed(trajectory: Trajectory, number: int) -> Trajectory:
    """Return an episode that broke off after two turns."""
    return replace(
        trajectory,
        trajectory_id=f"broken/{number}",
        turns=trajectory.turns[:2],
        stop_reason=StopReason.ENV_ERROR,
        error="environment: gone",
    )


def test_failed_trajectories_are_left_as_they_are_and_the_others_find_their_places(
    runner: asyncio.Runner, walks: list[TrajectoryGroup]
) -> None:
    broken = [failed(walks[0].trajectories[0], number) for number in range(4)]
    mixed = [
        replace(walks[0], trajectories=(broken[0], *walks[0].trajectories, broken[1])),
        TrajectoryGroup(group_id="lost", trajectories=(broken[2],)),
        replace(walks[1], trajectories=(walks[1].trajectories[0], broken[3], walks[1].trajectories[1])),
    ]
    signals = new_signals(runner, {"scheme": "turn_gae"}, policy=new_policy())
    found = signals.measure(mixed)
    assert [t for group in found for t in group.trajectories if t.failed] == broken
    assert [[t.trajectory_id for t in group.trajectories] for group in found] == [
        [t.trajectory_id for t in group.trajectories] for group in mixed
    ]
    healthy = [t for group in found for t in group.valid]
    assert healthy == [t for group in signals.measure(walks) for t in group.trajectories]


def test_a_step_of_failed_episodes_alone_is_measured_and_learned_without_complaint(
    runner: asyncio.Runner, walks: list[TrajectoryGroup]
) -> None:
    lost = [TrajectoryGroup(group_id="lost", trajectories=(failed(walks[0].trajectories[0], 0),))]
    signals = new_signals(runner, {"scheme": "turn_gae"}, policy=new_policy())
    assert signals.measure(lost) == lost
    assert signals.fit(lost) == {}


@pytest.mark.parametrize("temperature", first_quick([0.7, 1.0]))
def test_every_pass_is_at_the_temperature_of_the_rollouts_and_in_its_own_context(
    temperature: float, runner: asyncio.Runner
) -> None:
    policy, teacher, reference = (new_policy(seed) for seed in (0, 7, 8))
    groups = groups_of(play(policy, num=4, temperature=temperature))
    originals = [t for group in groups for t in group.trajectories]
    sampled = [list(zip(contexts(t), [turn.action_ids for turn in t.turns], strict=True)) for t in originals]
    tools = base_env(make_env("key_door")).tools
    told = [list(asked(rows_in_hindsight(t, StartsAgain(TOKENIZER), tools, view=HistoryConfig()))) for t in originals]
    new = partial(
        new_signals,
        runner,
        policy=policy,
        reference=reference,
        load_teacher=lambda: teacher,
        temperature=temperature,
    )

    def measured(credit: dict[str, Any], name: str) -> list[list[float]]:
        return [column(t, name) for group in new(credit).measure(groups) for t in group.trajectories]

    def check(found: list[list[float]], model: Policy, read: list[list[Any]]) -> None:
        for column_T, turns in zip(found, read, strict=True):
            expected_T = plain_passes(model, turns, temperature=temperature)[0]
            np.testing.assert_allclose(column_T, expected_T, rtol=1e-5, atol=1e-5)

    check([behavior(t) for t in originals], policy, sampled)
    check(measured({"scheme": "distill"}, "teacher_logprobs"), teacher, sampled)
    check(measured({"scheme": "distill", "teacher": "reference"}, "reference_logprobs"), reference, sampled)
    in_hindsight = measured({"scheme": "distill", "teacher": "hindsight"}, "hindsight_logprobs")
    check(in_hindsight, policy, told)
    for column_T, trajectory in zip(in_hindsight, originals, strict=True):
        assert np.abs(np.subtract(column_T, behavior(trajectory))).max() > 1e-3  # the hint is read


@pytest.mark.parametrize("temperature", first_quick([0.7, 1.0]))
def test_a_teacher_that_is_the_policy_itself_has_nothing_to_teach(temperature: float, runner: asyncio.Runner) -> None:
    policy = new_policy()
    groups = groups_of(play(policy, num=4, temperature=temperature))

    def largest_advantage(credit: dict[str, Any], teacher: Policy) -> float:
        signals = new_signals(
            runner,
            credit,
            policy=policy,
            reference=teacher,
            load_teacher=lambda: teacher,
            temperature=temperature,
        )
        credits = load_credit(credit).assign(signals.measure(groups))
        return max(float(np.abs(c.advantages_T).max()) for of_group in credits for c in of_group)

    for credit in ({"scheme": "distill"}, {"scheme": "distill", "teacher": "reference"}):
        assert largest_advantage(credit, new_policy()) < 1e-4  # engine and trainer round otherwise, in float32
        assert largest_advantage(credit, new_policy(seed=7)) > 1


def test_the_teacher_is_neither_trained_nor_shared_with_the_policy(
    runner: asyncio.Runner, walks: list[TrajectoryGroup]
) -> None:
    policy, teacher = new_policy(), new_policy(seed=7)
    signals = new_signals(runner, {"scheme": "distill"}, policy=policy, load_teacher=lambda: teacher)
    signals.measure(walks)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in policy.parameters())


def test_the_score_of_the_known_answer_is_that_of_a_plain_pass(
    runner: asyncio.Runner, sums: list[TrajectoryGroup]
) -> None:
    policy, renderer = new_policy(), ChatMLRenderer(TOKENIZER)
    signals = new_signals(
        runner, {"scheme": "info_gain"}, policy=policy, renderer=renderer, env="calculator", temperature=0.7
    )
    for group, measured in zip(sums, signals.measure(sums), strict=True):
        for original, trajectory in zip(group.trajectories, measured.trajectories, strict=True):
            assert original.gold_answer
            answer_ids = TOKENIZER.encode(original.gold_answer, add_special_tokens=False)
            means = [np.mean(plain_pass(policy, ids, answer_ids, temperature=0.7)[0]) for ids in contexts(original)]
            found = [turn.signals["answer_logprobs"] for turn in trajectory.turns]
            np.testing.assert_allclose(np.array(found, dtype=np.float64), means, rtol=1e-5)


def test_a_scheme_that_scores_the_known_answer_needs_one(runner: asyncio.Runner, walks: list[TrajectoryGroup]) -> None:
    signals = new_signals(runner, {"scheme": "info_gain"}, policy=new_policy())
    with pytest.raises(ConfigError) as caught:
        signals.measure(walks)
    assert str(caught.value) == (
        f"credit.scheme: trajectory {walks[0].trajectories[0].trajectory_id}: gold_answer() of KeyDoor returned None, and "
        "the scheme scores it after each turn; return the task's answer, or choose another scheme"
    )


def test_the_judge_has_the_recipes_deadline_and_threads(runner: asyncio.Runner, walks: list[TrajectoryGroup]) -> None:
    new = partial(new_signals, runner, {"scheme": "judge"}, policy=new_policy())
    hasty = new(judge=f"{__name__}:slow_judge", judge_timeout_s=0.1)
    with pytest.raises(UserError, match=r"no score within signals\.judge_timeout_s: 0\.1 s"):
        hasty.measure(walks)
    for num_threads in (1, 2, 4):
        MEETING.expect(num_threads)
        measured = new(judge=f"{__name__}:MEETING", judge_threads=num_threads).measure(walks)
        assert MEETING.peak == num_threads
        assert [
            [turn.signals["turn_scores"] for turn in t.turns] for group in measured for t in group.trajectories
        ] == [length_judge(t) for group in walks for t in group.trajectories]


@each(("gamma", "returns"), [(1.0, (3.0, 3.0, 3.0)), (0.5, (0.75, 1.5, 3.0)), (0.0, (0.0, 0.0, 3.0))])
def test_the_critic_learns_returns_under_the_discount_of_the_scheme(
    gamma: float, returns: tuple[float, ...], runner: asyncio.Runner
) -> None:
    turns = [
        Turn(observation_ids=(5, 6), action_ids=(7, 8), behavior_logprobs=(-1.0,) * 2, versions=(0,) * 2, reward=reward)
        for reward in (0.0, 0.0, 3.0)
    ]
    trajectory = Trajectory(
        group_id="g",
        trajectory_id="g/0",
        env_id="e",
        seed=0,
        turns=tuple(turns),
        stop_reason=StopReason.TERMINATED,
    )
    critic = {"epochs": 1, "num_minibatches": 1}
    plain = {"scheme": "turn_gae", "gamma": gamma}
    for scheme in (plain, {"scheme": "shuffled", "of": plain}):
        signals = new_signals(runner, scheme, policy=new_policy(), critic=critic)
        metrics = signals.fit(signals.measure([TrajectoryGroup(group_id="g", trajectories=(trajectory,))]))
        # Every value is 0 before the first update: the loss is the mean square of the returns, of two tokens and what follows.
        assert metrics["critic/loss"] == pytest.approx(np.average(np.square(returns), weights=[2, 3, 3]), rel=1e-6)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that plays key_door now well, now badly: a policy that earns nothing has nothing to learn from."""
    path = tmp_path_factory.mktemp("warm")
    settings = recipe(
        path,
        warmup={"steps": 120, "num_demonstrations": 32, "skill": 0.5, "learning_rate": 2e-2},
        rollout=ROLLOUT,
        train={"steps": 1},
    )
    with build(settings) as parts:
        loop.train(parts)
        parts.policy.model.save_pretrained(path / "model")
        parts.tokenizer.save_pretrained(path / "model")
    return path / "model"


ROLLOUT = {
    "max_turns": 6,
    "max_turn_tokens": 16,
    "max_episode_tokens": 64,
    "max_context_tokens": 512,
    "branches": {"num": 2, "every": 2},
}


def trained(settings: Recipe, folder: RunFolder | None = None) -> tuple[list[dict[str, float]], Parts]:
    """Train; return the rows and what they were trained with, closed."""
    with build(settings, tokenizer_folder=None if folder is None else folder.tokenizer) as parts:
        return loop.train(parts, folder)[1], parts


def with_model(folder: Path, tmp_path: Path, credit: dict[str, Any], **sections: Any) -> Recipe:
    settings = {"model": {"name_or_path": str(folder)}, "rollout": ROLLOUT, **sections}
    return recipe(tmp_path, credit=credit, **settings)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "credit",
    first_quick(
        [
            {"scheme": "turn_gae"},
            {"scheme": "tree"},
            {"scheme": "distill", "teacher": "model"},
            {"scheme": "judge", "score_weight": 0.1},
            {"scheme": "distill", "teacher": "reference"},
            {"scheme": "distill", "teacher": "hindsight"},
        ],
        num=2,
    ),
    ids=lambda credit: "-".join(map(str, credit.values())),
)
def test_a_run_trains_with_each_scheme_that_reads_signals(credit: dict[str, Any], warm: Path, tmp_path: Path) -> None:
    signals = {"judge": JUDGE, "teacher": str(warm)}
    _, rows = train(with_model(warm, tmp_path, credit, signals=signals))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["episode/turns"] > 2 and row["grad_norm"] > 0 for row in rows[1:])
    needs = load_credit(credit).requirements()
    assert all(
        ("critic/loss" in row) == ("critic/explained_variance" in row) == ("values" in needs) for row in rows[1:]
    )
    assert all(("episode/branches" in row) == ("branches" in needs) for row in rows[1:])
    assert all(row["critic/loss"] > 0 for row in rows[1:] if "values" in needs)


@pytest.mark.slow
@pytest.mark.process
def test_a_run_on_a_task_with_a_known_answer_trains_by_information_gain(warm: Path, tmp_path: Path) -> None:
    _, rows = train(with_model(warm, tmp_path, {"scheme": "info_gain"}, env={"id": "calculator"}))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert any(row["episode/turns"] > 1 and row["grad_norm"] > 0 for row in rows[1:])


class Forgetful(Calculator):
    """Says that it knows the answer, and does not tell."""

    def gold_answer(self) -> Any:
        return None


class Silent(Calculator):
    """Says that it knows the answer, which is nothing."""

    def gold_answer(self) -> Any:
        return ""


@pytest.mark.process
@pytest.mark.parametrize(("env", "words"), [(Forgetful, "None"), (Silent, "''")])
def test_an_answer_that_is_missing_stops_the_run(env: type[Calculator], words: str, warm: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"gold_answer\(\) of {env.__name__} returned {words}"):
        train(with_model(warm, tmp_path, {"scheme": "info_gain"}, env={"id": f"{__name__}:{env.__name__}"}))


class Locked(KeyDoor):
    """Holds what cannot be copied."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lock = threading.Lock()


def test_an_environment_that_cannot_be_forked_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=r"fork\(\) raised TypeError: cannot pickle '_thread\.lock'"):
        train(recipe(tmp_path, credit={"scheme": "tree"}, env={"id": f"{__name__}:Locked"}))
    assert not (tmp_path / "run").exists()


def test_what_the_scheme_tells_the_policy_must_fit_its_positions(
    runner: asyncio.Runner, walks: list[TrajectoryGroup]
) -> None:
    policy = new_policy()
    policy.model.config.max_position_embeddings = 64
    signals = new_signals(runner, {"scheme": "distill", "teacher": "hindsight"}, policy=policy)
    with pytest.raises(ConfigError, match=r"makes a context of \d+ tokens, beyond the model's 64 positions"):
        signals.measure(walks)


@pytest.mark.slow
@pytest.mark.process
def test_an_evaluation_misses_neither_critic_nor_teacher(warm: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(warm, teacher)
    folder, _ = train(with_model(warm, tmp_path, {"scheme": "distill"}, signals={"teacher": str(teacher)}))
    shutil.rmtree(teacher)
    main(["eval", str(folder.path)])
    folder, _ = train(with_model(warm, tmp_path / "critic", {"scheme": "turn_gae"}))
    main(["eval", str(folder.path)])


@each(
    ("credit", "need"),
    [
        ({"scheme": "judge"}, "turn_scores (set signals.judge to module:function). "),
        ({"scheme": "distill"}, "teacher_logprobs (set signals.teacher to a model). "),
        # key_door has no single answer
        ({"scheme": "info_gain"}, "answer_logprobs, which the environment 'key_door' lacks. "),
    ],
)
def test_a_scheme_whose_signal_has_no_source_is_refused(credit: dict[str, Any], need: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(recipe(tmp_path, credit=credit))
    words = str(caught.value)
    assert words.startswith(f"credit.scheme: {credit['scheme']!r} needs {need}")
    _, _, working = words.partition("These would work: ")
    names = working.partition(". Or set")[0].split(", ")
    assert {"uniform", "turn_gae", "tree", "action_values"} <= set(names)
    assert not {"judge", "distill", "info_gain", "shuffled"} & set(names)


@pytest.mark.parametrize(
    ("signals", "words"),
    [
        ({"judge": "no_such_module:judge"}, r"signals\.judge: cannot import 'no_such_module'"),
        ({"judge": f"{__name__}:JUDGE"}, r"signals\.judge: .* not a function of a trajectory"),
    ],
)
def test_a_judge_that_cannot_be_called_is_refused_before_anything_is_written(
    signals: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(recipe(tmp_path, credit={"scheme": "judge"}, signals=signals))
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_does_not_exist_or_fit_is_refused(warm: Path, tmp_path: Path) -> None:
    credit = {"scheme": "distill"}
    with pytest.raises(ConfigError, match=r"signals\.teacher: no model in"):
        train(recipe(tmp_path, credit=credit, signals={"teacher": str(tmp_path / "nothing")}))
    with pytest.raises(ConfigError, match=r"signals\.teacher: the tokenizer of .* is not the policy's"):
        train(recipe(tmp_path, credit=credit, signals={"teacher": str(warm)}))  # the local model knows bytes alone


def learned(folder: Path, step: int) -> dict[str, Any]:
    """Return what a checkpoint holds of the critic."""
    state: dict[str, Any] = torch.load(folder / "checkpoints" / f"step-{step:06d}" / "values.pt", weights_only=True)
    return state


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("credit", "signals"),
    first_quick(
        [
            ({"scheme": "turn_gae"}, {"critic": {"model": "head"}}),
            ({"scheme": "turn_gae"}, {"critic": {"model": "separate"}}),
            ({"scheme": "distill", "teacher": "reference"}, {}),
        ]
    ),
    ids=["head", "separate", "reference"],
)
def test_a_resumed_run_repeats_bit_for_bit(
    credit: dict[str, Any], signals: dict[str, Any], warm: Path, tmp_path: Path
) -> None:
    def settings(name: str, steps: int) -> Recipe:
        train = {"steps": steps, "learning_rate": 1e-2}
        every = {"every": 1, "num_tasks": 2}
        return with_model(warm, tmp_path / name, credit, signals=signals, train=train, evaluation=every)

    expected, whole = trained(settings("whole", 3))
    folder, _ = train(settings("parts", 1))
    rows, resumed = trained(settings("parts", 3), folder)
    assert list(map(repeatable, rows)) == list(map(repeatable, expected))
    assert all(row["grad_norm"] > 0 for row in rows[1:])
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    if credit["scheme"] != "distill":
        states = [learned(tmp_path / name / "run", 3) for name in ("whole", "parts")]
        assert states[0]["num_updates"] == states[1]["num_updates"] == 3 * 2 * 4
        for part in ("head", "body"):
            assert states[0][part].keys() == states[1][part].keys()
            assert all(torch.equal(states[0][part][name], states[1][part][name]) for name in states[0][part])


@pytest.mark.process
def test_a_scheme_that_reads_the_reference_cannot_be_added_to_a_run_that_kept_none(warm: Path, tmp_path: Path) -> None:
    folder, _ = train(with_model(warm, tmp_path, {"scheme": "uniform"}, train={"steps": 1}))
    other = with_model(warm, tmp_path, {"scheme": "distill", "teacher": "reference"})
    with pytest.raises(ConfigError, match=r"credit\.scheme: 'distill' needs the policy with which .* began"):
        train(other, folder)


@pytest.mark.process
def test_a_critic_cannot_be_added_to_a_run_that_had_none(warm: Path, tmp_path: Path) -> None:
    folder, _ = train(with_model(warm, tmp_path, {"scheme": "uniform"}, train={"steps": 1}))
    with pytest.raises(ConfigError, match="the credit scheme reads values, and this run trained nothing for them"):
        train(with_model(warm, tmp_path, {"scheme": "turn_gae"}), folder)


@pytest.mark.process
def test_a_separate_critic_begins_as_the_policy_that_was_warmed_up(tmp_path: Path) -> None:
    settings = recipe(
        tmp_path,
        credit={"scheme": "turn_gae"},
        signals={"critic": {"model": "separate", "learning_rate": 1e-30}},
        warmup={"steps": 3, "num_demonstrations": 8},
        train={"steps": 1, "learning_rate": 1e-30},
    )
    with build(settings) as parts:
        before = copy.deepcopy(parts.policy.model.base_model.state_dict())
        loop.train(parts)
    body, policy = learned(tmp_path / "run", 1)["body"], parts.policy.model.base_model.state_dict()
    assert all(torch.equal(body[name], policy[name]) for name in policy)
    assert not all(torch.equal(body[name], before[name]) for name in before)
