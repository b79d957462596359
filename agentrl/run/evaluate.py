"""Evaluation on held-out tasks, in a run or beside it."""

from agentrl.distributed.processes import all_gather, num_processes
from agentrl.rollout import EpisodeContext, RolloutPool
from agentrl.rollout.evaluation import Evaluation, evaluated, play_held_out
from agentrl.run.build import Parts


def evaluate(parts: Parts) -> Evaluation:
    """Play the held-out tasks with the weights in the engine; nothing of the training state is touched."""
    recipe, share, runner = parts.recipe, parts.share, parts.runner
    pool = RolloutPool(
        make_env=parts.make_env,
        context=EpisodeContext(
            engine=parts.engine,
            renderer=parts.renderer,
            config=recipe.rollout.model_copy(update={"temperature": recipe.evaluation.temperature}),
        ),
        seed=recipe.seed,
        on_fault=parts.on_fault,
    )
    is_async = recipe.rollout.samples_during_update
    runner.run(parts.pool.resume())  # episodes that a step interrupted are continued meanwhile
    try:
        playing = play_held_out(pool, recipe.evaluation, seed=recipe.seed, share=share)
        groups = runner.run(playing) if share.num_groups else []
    finally:
        pool.close()
        if not is_async or num_processes() > 1:  # no deadline shall pass while others are waited for
            runner.run(parts.pool.pause())
    groups = all_gather(groups)
    if is_async and num_processes() > 1:
        runner.run(parts.pool.resume())
    return evaluated(groups, recipe.evaluation)


def evaluation_metrics(parts: Parts) -> dict[str, float]:
    """Evaluate; return what was found as metrics of a step."""
    return {f"eval/{name}": value for name, value in evaluate(parts).metrics.items()}
