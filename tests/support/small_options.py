"""Options that make the default recipe train in seconds."""

_SMALL = {
    "--model.local.hidden_size": 16,
    "--model.local.num_layers": 1,
    "--model.local.num_heads": 2,
    "--model.local.num_kv_heads": 1,
    "--model.local.intermediate_size": 32,
    "--warmup.steps": 2,
    "--warmup.num_demonstrations": 16,
    "--rollout.num_groups": 2,
    "--rollout.group_size": 2,
    "--rollout.max_turns": 2,
    "--rollout.max_turn_tokens": 8,
    "--train.steps": 1,
    "--train.num_minibatches": 2,
    "--evaluation.num_tasks": 2,
}
SMALL_OPTIONS = [str(word) for option in _SMALL.items() for word in option]
