"""Evaluation, in a run or beside it."""

from agentrl.distributed.processes import is_main
from agentrl.report.folder import RunFolder
from agentrl.report.terminal import Panel, note_panels
from agentrl.rollout.evaluation import Evaluation, play_evaluation, summarize_evaluation
from agentrl.run.build import Parts, warn_of_move
from agentrl.run.weight_sync import sampled_by_all


def evaluate(parts: Parts) -> dict[str, Evaluation]:
    """Play the evaluation tasks with the weights in the engine; nothing of the training state is touched.

    Returns: the results by the prefix of their metrics: `eval/`, or `eval/NAME/` if `evaluation.env` names several.
    """
    recipe, found = parts.recipe, {}
    config = recipe.rollout.model_copy(update={"temperature": recipe.evaluation.temperature})
    for env in parts.evaluation_envs:
        pool = parts.pool.with_config(config, player=env.player, tasks=env.tasks)
        playing = play_evaluation(pool, recipe.evaluation, shard=parts.pool.shard, prefix=env.prefix)
        try:
            groups = sampled_by_all(parts.pool, parts.learner.state, parts.runner, playing)
        finally:
            pool.close()
        warn_of_move(parts, named.id if (named := recipe.evaluation.env.get(env.name)) else recipe.player_id)
        found[env.prefix] = summarize_evaluation(groups, recipe.evaluation)
    return found


def evaluation_metrics(parts: Parts) -> dict[str, float]:
    """Evaluate a run under way; record the tasks and settings in its folder, and return the metrics."""
    found = evaluate(parts)
    if is_main() and parts.recipe.run_dir is not None:
        step, config = parts.engine.version, parts.recipe.evaluation
        panels = {
            prefix: Panel(tasks=each.panel, since=step, temperature=config.temperature, samples=config.samples)
            for prefix, each in found.items()
        }
        note_panels(RunFolder(parts.recipe.run_dir), panels)
    return {f"{prefix}{name}": value for prefix, each in found.items() for name, value in each.metrics.items()}
