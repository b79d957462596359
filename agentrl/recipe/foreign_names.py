"""What fields and values of other libraries (TRL, verl, verifiers) are called here, for the words of an error."""

from collections.abc import Iterable

_PARTS = "a step's rollouts are split by train.num_minibatches (updates) and train.max_tokens_per_micro_batch (memory)"
_SUPPORT = "There is none: training samples from the whole distribution, see rollout.top_p."
_ONCE = "There is none: a step trains once on what it sampled, in train.num_minibatches updates."
_TABLE = "env: {id: tasks, options: {tasks: FILE}}"
_REWARDS = "env.options.rewards, of the environment 'tasks'"
_PROCESSES = "There is none: `agentrl launch --processes N` says how many."

FIELDS: dict[str, str] = {
    # sampling
    **dict.fromkeys(
        ("num_generations", "n", "rollout_n", "rollouts_per_example", "rollouts_per_prompt", "n_samples_per_prompt"),
        "rollout.group_size",
    ),
    **dict.fromkeys(("num_prompts", "prompts_per_step", "num_unique_prompts", "groups_per_step"), "rollout.num_groups"),
    **dict.fromkeys(
        ("generation_batch_size", "train_batch_size", "rollout_batch_size"),
        "rollout.num_groups (tasks of a step, each with rollout.group_size episodes)",
    ),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_tokens"), "rollout.max_turn_tokens"),
    **dict.fromkeys(("max_response_length", "response_length"), "rollout.max_episode_tokens"),
    **dict.fromkeys(
        (
            "max_prompt_length",
            "max_prompt_len",
            "max_seq_len",
            "max_seq_length",
            "max_length",
            "max_model_len",
            "seq_len",
        ),
        "rollout.max_context_tokens (prompt and actions together)",
    ),
    "vllm_max_model_length": "rollout.max_context_tokens",
    **dict.fromkeys(
        ("max_tool_calling_iterations", "max_assistant_turns", "max_user_turns", "max_iterations"), "rollout.max_turns"
    ),
    **dict.fromkeys(("max_concurrent", "max_concurrency", "max_num_seqs"), "rollout.max_live_episodes"),
    **dict.fromkeys(("max_async_level", "staleness_threshold", "max_off_policy_steps"), "rollout.max_staleness"),
    **dict.fromkeys(("partial_rollout", "async_training", "fully_async"), "rollout.mode"),
    **dict.fromkeys(
        ("filter_groups", "filter_zero_std_groups", "online_difficulty_filtering"), "rollout.dynamic_sampling"
    ),
    **dict.fromkeys(("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), _SUPPORT),
    # loss and credit
    **dict.fromkeys(
        ("beta", "kl", "kl_beta", "kl_coef", "kl_coeff", "kl_loss_coef", "kl_penalty", "init_kl_coef"),
        "loss.kl_coefficient",
    ),
    **dict.fromkeys(
        ("epsilon", "eps_clip", "clip_eps", "clip_range", "cliprange", "clip_ratio"), "loss.clip_low and loss.clip_high"
    ),
    **dict.fromkeys(("epsilon_low", "clip_ratio_low", "eps_low", "eps_clip_low"), "loss.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_high", "eps_clip_high"), "loss.clip_high"),
    **dict.fromkeys(("importance_sampling_level", "ratio_unit", "ratio_level"), "loss.unit"),
    **dict.fromkeys(("loss_type", "loss_agg_mode", "loss_aggregation"), "loss.aggregation"),
    **dict.fromkeys(("loss_mode", "policy_loss"), "loss.unit"),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "algorithm", "algo", "rl_algorithm"), "credit.scheme"),
    **dict.fromkeys(
        ("scale_rewards", "norm_adv_by_std_in_grpo", "whiten_advantages", "normalize_advantages"),
        "credit.normalize, of the scheme 'uniform'",
    ),
    **dict.fromkeys(("discount", "discount_factor"), "credit.gamma, where the scheme has one"),
    "gamma": "credit.gamma, where the scheme has one",
    **dict.fromkeys(("lam", "lambda", "gae_lambda"), "credit.lam, where the scheme has one"),
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "rollout_is", "tis"), "loss.mismatch"
    ),
    **dict.fromkeys(
        (
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
            "tis_imp_ratio_cap",
            "rollout_is_threshold",
        ),
        "loss.mismatch_limit",
    ),
    **dict.fromkeys(
        ("entropy_coef", "entropy_coeff", "entropy_coefficient"), "There is none: entropy is only measured."
    ),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_ppo_epochs", "mu"), _ONCE),
    # optimizer and course
    **dict.fromkeys(("lr", "actor_lr", "policy_lr"), "train.learning_rate"),
    "critic_lr": "signals.critic.learning_rate",
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style"), "train.schedule"),
    **dict.fromkeys(
        ("warmup_steps", "lr_warmup_steps", "warmup_ratio", "lr_warmup_steps_ratio"), "train.warmup_minibatches"
    ),
    "optim": "train.optimizer",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "train.betas"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm", "gradient_clipping"), "train.max_grad_norm"),
    **dict.fromkeys(
        ("max_steps", "num_steps", "total_steps", "total_training_steps", "num_train_epochs", "num_epochs"),
        "train.steps",
    ),
    "total_epochs": "train.steps",
    **dict.fromkeys(
        ("steps_per_generation", "gradient_accumulation_steps", "ppo_mini_batch_size", "mini_batch_size"),
        f"There is none: {_PARTS}.",
    ),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "ppo_micro_batch_size_per_gpu", "train_micro_batch_size"),
        f"There is none: {_PARTS}.",
    ),
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    **dict.fromkeys(("bf16", "bfloat16"), "train.precision: bfloat16"),
    **dict.fromkeys(("fp16", "float16", "torch_dtype", "dtype", "mixed_precision"), "train.precision"),
    "enable_gradient_checkpointing": "train.gradient_checkpointing",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "zero_stage"), "train.sharding: full"),
    **dict.fromkeys(("num_gpus", "n_gpus_per_node", "nnodes", "num_processes", "world_size"), _PROCESSES),
    # model and engine
    **dict.fromkeys(
        (
            "model.name",
            "model.path",
            "model_name",
            "model_name_or_path",
            "model_path",
            "model_id",
            "pretrained",
            "policy_model",
        ),
        "model.name_or_path",
    ),
    "attn_implementation": "model.attention",
    **dict.fromkeys(("use_peft", "peft_config", "use_lora", "lora_config"), "model.lora"),
    **dict.fromkeys(("lora_r", "lora_rank"), "model.lora.rank"),
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    **dict.fromkeys(("use_vllm", "vllm_mode", "inference_backend"), "engine.name"),
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"), "engine.vllm: {gpu_memory_utilization: 0.9}"
    ),
    **dict.fromkeys(
        ("vllm_tensor_parallel_size", "tensor_parallel_size", "tensor_model_parallel_size"),
        "engine.vllm: {tensor_parallel_size: 2}",
    ),
    "vllm_enable_sleep_mode": "engine.sleep",
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host", "base_url"), "engine.server.url"),
    "teacher_model": "signals.teacher",
    **dict.fromkeys(("system_prompt", "system_message"), "chat.system"),
    "chat_template": "chat.template",
    "chat_template_kwargs": "chat.template_variables",
    # tasks and rewards
    **dict.fromkeys(("env_id", "env_name", "environment"), "env.id"),
    **dict.fromkeys(("env_args", "env_kwargs", "env_config", "environment_kwargs"), "env.options"),
    **dict.fromkeys(("dataset", "dataset_name", "train_dataset", "train_files", "data", "prompt_data"), _TABLE),
    **dict.fromkeys(
        ("reward_funcs", "reward_fn", "reward_func", "reward_function", "reward_weights", "rubric"), _REWARDS
    ),
    # evaluation and records
    **dict.fromkeys(("eval_steps", "eval_every", "eval_interval", "test_freq", "eval_freq"), "evaluation.every"),
    **dict.fromkeys(("num_generations_eval", "eval_rollouts_per_example"), "evaluation.samples"),
    **dict.fromkeys(("num_eval_examples", "num_examples", "eval_num_examples"), "evaluation.num_tasks"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval", "save_every"), "train.checkpoint_every"),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), "train.keep_last"),
    **dict.fromkeys(("output_dir", "default_local_dir", "run_name", "experiment_name"), "run_dir"),
    **dict.fromkeys(("report_to", "logger", "use_wandb", "wandb", "log_with"), "report.trackers"),
    **dict.fromkeys(("project_name", "wandb_project", "trackio_project"), "report.project"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "There is none: agentrl export RUN FOLDER --push OWNER/NAME."),
    **dict.fromkeys(("log_completions", "rollout_data_dir", "log_rollouts"), "report.rollouts_every"),
    **dict.fromkeys(("logging_steps", "log_freq", "log_every"), "There is none: every step is a row of metrics.jsonl."),
}
"""A field, what is to be set, or a sentence (which ends in a full stop), by the name that people bring."""

SCHEMES = {
    "grpo": "credit.scheme: uniform with loss.unit: token",
    **dict.fromkeys(
        ("gspo", "gspo_token", "gspo-token"), "credit.scheme: uniform with loss: {unit: trajectory, trust: fixed}"
    ),
    "dr_grpo": "credit: {scheme: uniform, normalize: none} with loss: {unit: token, aggregation: constant, "
    "constant_length: 1024}",
    "dapo": "credit.scheme: uniform with loss: {unit: token, aggregation: token-mean} and rollout.dynamic_sampling",
    "bnpo": "credit.scheme: uniform with loss: {unit: token, aggregation: token-mean}",
    "rloo": "credit: {scheme: uniform, normalize: leave_one_out}",
    **dict.fromkeys(
        ("reinforce++", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        "credit: {scheme: uniform, normalize: batch} with loss.unit: token",
    ),
    "reinforce": "credit.scheme: turn_return",
    **dict.fromkeys(("ppo", "gae"), "credit.scheme: turn_gae with loss.unit: token"),
}
"""What sets an algorithm, by its name."""

VALUES: dict[str, dict[str, str]] = {
    "train.precision": {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "no": "float32"},
    "train.optimizer": {
        **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw8bit", "adam_8bit"), "adamw_8bit"),
        "paged_adamw_32bit": "paged_adamw",
    },
    "train.schedule": dict.fromkeys(("constant_with_warmup", "warmup"), "constant, with train.warmup_minibatches"),
    "train.stop_on": {"collapse": "train.on_collapse: stop"},
    "train.sharding": dict.fromkeys(("fsdp", "fsdp2", "zero3", "full_shard"), "full") | {"ddp": "none"},
    "loss.unit": dict.fromkeys(("sequence", "sequence_token", "seq", "episode"), "trajectory") | {"step": "turn"},
    "loss.aggregation": {
        **dict.fromkeys(("grpo", "seq-mean-token-mean"), "trajectory-mean"),
        **dict.fromkeys(("dapo", "bnpo", "token_mean"), "token-mean"),
        **dict.fromkeys(("dr_grpo", "seq-mean-token-sum-norm"), "constant, with loss.constant_length"),
    },
    "loss.mismatch": {
        **dict.fromkeys(("tis", "token_truncate", "sequence_truncate"), "truncate"),
        **dict.fromkeys(("mis", "icepop", "token_mask", "sequence_mask"), "mask"),
    },
    "model.attention": {
        "flash_attention": "flash_attention_2",
        "flash_attn": "flash_attention_2",
        "flex": "flex_attention",
    },
    "engine.name": dict.fromkeys(("hf", "huggingface"), "transformers") | {"vllm-server": "vllm_server"},
    "rollout.mode": {"fully_async": "async"},
}
"""Values of a field, by those that people bring."""


def of_field(name: str, value: object = None) -> str | None:
    """Return what an unknown field is called here, as the end of an error; None: nothing is known of it."""
    key = name.lower().replace("-", "_")
    found = FIELDS.get(key) or SCHEMES.get(key)
    if found is None or found.endswith("."):
        return found and f" {found}"
    known = _value(found, value)
    return _meant(found if known is None else known if found == "credit.scheme" else f"{found}: {known}")


def of_path(path: str, value: object = None) -> str | None:
    """Return what a field is called here that has this name in this section alone, as `of_field`."""
    names = ".".join(path.split(".")[-2:])
    return of_field(names, value) if names in FIELDS else None


def of_value(field: str, value: object) -> str:
    """Return what a field's value is called here, as the end of an error; empty where nothing is known of it."""
    known = _value("credit.scheme" if field in ("credit", "loss") else field, value)
    return "" if known is None else _meant(known)


def at_home(name: str, fields: Iterable[str]) -> str | None:
    """Return which fields have this very name, as the end of an error; None: none has."""
    found = [field for field in fields if field.removeprefix("--").rpartition(".")[2] == name]
    return _meant(*found) if found else None


def _value(field: str, value: object) -> str | None:
    known = SCHEMES if field == "credit.scheme" else VALUES.get(field, {})
    return known.get(value.lower()) if isinstance(value, str) else None


def _meant(*known: str) -> str:
    return f" Did you mean {' or '.join(map(repr, known))}?"
