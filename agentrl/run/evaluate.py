"""Evaluation, in a run or beside it."""

from agentrl.rollout.evaluation import Evaluation, evaluated, play_evaluation
from agentrl.run.build import Parts
from agentrl.run.sampling import sampled_by_all


def evaluate(parts: Parts) -> Evaluation:
    """Play the evaluation tasks with the weights in the engine; nothing of the training state is touched."""
    recipe = parts.recipe
    config = recipe.rollout.model_copy(update={"temperature": recipe.evaluation.temperature})
    pool = parts.pool.beside(config)
    playing = play_evaluation(pool, recipe.evaluation, share=parts.pool.share)
    try:
        groups = sampled_by_all(parts.pool, parts.runner, playing)
    finally:
        pool.close()
    return evaluated(groups, recipe.evaluation)


def evaluation_metrics(parts: Parts) -> dict[str, float]:
    """Evaluate; return what was found as metrics of a step."""
    return {f"eval/{name}": value for name, value in evaluate(parts).metrics.items()}
