"""Export of a run's weights for other programs, and a vLLM server for a recipe."""

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from agentrl.chat import load_tokenizer
from agentrl.data.files import check_name
from agentrl.distributed.checkpoints import checkpoint_errors, step_of
from agentrl.engine.base import Adapters
from agentrl.engine.vllm.common import adapter_arguments, parse_dtype
from agentrl.engine.vllm.experts import routed_experts_arguments
from agentrl.engine.vllm.launch import Server, start_server
from agentrl.engine.vllm.servers import VLLMServerConfig
from agentrl.errors import ConfigError
from agentrl.learn.policy_state import load_weights
from agentrl.models.auto_classes import auto_class, freeze_towers
from agentrl.policy.export import export_adapter, export_model, stop_at, write_config
from agentrl.policy.lora import adapted_layers, add_lora
from agentrl.policy.model import Policy, load_pretrained, make_local_model, open_checkpoint, open_config
from agentrl.recipe.config import Recipe
from agentrl.report.card import write_card
from agentrl.report.folder import RunFolder
from agentrl.run.build import build
from agentrl.run.checkpoint import checkpoint_at


def export(
    recipe: Recipe,
    run: RunFolder,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    only_adapter: bool = False,
    name: str | None = None,
    step: int | None = None,
) -> None:
    """Write a run's policy as a Hugging Face folder, or its adapters as a folder of peft's, with a model card.

    Neither environment nor engine is built.

    Args:
        recipe: recipe of the run.
        run: folder of the run.
        folder: folder to write.
        dtype: dtype of the weights. None: that of the model that was trained; of one with adapters, as they were trained.
        only_adapter: write the adapters alone.
        name: name of the model on its card. None: that of the folder.
        step: step of the checkpoint. None: the newest.

    Raises:
        ConfigError: when the run has no such checkpoint, or none that fits the recipe, or trains no adapter to write.
    """
    check_name(folder)
    checkpoint = checkpoint_at(run, step)
    if only_adapter and recipe.model.lora is None:
        raise ConfigError("this run trains no adapter (model.lora)")
    # Of adapters, rounding would take most of a young one away.
    if dtype is None and recipe.model.name_or_path is not None and recipe.model.lora is None:
        dtype = open_config(recipe.model.name_or_path, field="model.name_or_path")[1].dtype
    model, tokenizer = _load_trained(recipe, run, checkpoint)

    card = partial(
        write_card,
        run=run,
        config=recipe.model_dump(mode="json"),
        name=name or folder.resolve().name,
        step=step_of(checkpoint),
        adapter=only_adapter,
        auto_class=auto_class(model.config).__name__,
    )
    if only_adapter:
        export_adapter(model, folder, also=card)
    else:
        renderer = recipe.chat.build(tokenizer, name=str(recipe.model.name_or_path or "local"))
        stop_at(model, renderer.stop_token_ids)
        tokenizer.chat_template = recipe.chat.exported_template(tokenizer)
        export_model(model, tokenizer, folder, dtype=dtype, also=card)


def _load_trained(recipe: Recipe, run: RunFolder, checkpoint: Path) -> tuple[Any, Any]:
    """Return a run's model with the weights of a checkpoint, and its tokenizer."""
    if recipe.model.name_or_path is not None:
        # Without `model.attention`, whose package may be missing: nothing attends.
        model, tokenizer = load_pretrained(recipe.model.name_or_path)
        freeze_towers(model)  # as in training: a sharded checkpoint has none of what is frozen
    else:
        tokenizer = load_tokenizer(run.tokenizer)
        model = make_local_model(recipe.model.local, tokenizer)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    with checkpoint_errors(checkpoint):
        load_weights(Policy(model), checkpoint)
    return model, tokenizer


def load_to_serve(recipe: Recipe, run: RunFolder | None, *, with_weights: bool) -> tuple[Any, Any]:
    """Return the model of a recipe or a run for `serve`, and its tokenizer.

    Args:
        recipe: recipe of a single rank that does not train.
        run: the run, if it is one's.
        with_weights: load them, a run's from its newest checkpoint. False: there are none, unless the model is a local one.
    """
    name = recipe.model.name_or_path
    if with_weights and run is not None:
        return _load_trained(recipe, run, checkpoint_at(run, None))
    if name is None:  # the environment's demonstrations may be needed for its tokenizer
        known = run.tokenizer if run is not None and run.tokenizer.is_dir() else None
        with build(recipe, tokenizer_folder=known) as parts:
            return parts.policy.model, parts.tokenizer
    if with_weights:
        model, tokenizer = load_pretrained(name)
    else:
        _, config, tokenizer = open_checkpoint(name, field="model.name_or_path")
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    return model, tokenizer


def serve(
    recipe: Recipe,
    config: VLLMServerConfig,
    folder: Path,
    *,
    model: Any,
    tokenizer: Any,
    with_weights: bool,
    timeout_s: float,
    returns_experts: bool = False,
) -> Server:
    """Start a vLLM server at the address of `config`.

    Args:
        recipe: recipe of the run.
        config: the engine's section.
        folder: folder for the model and the server's log.
        model: the model, as `load_to_serve` returns it.
        tokenizer: its tokenizer.
        with_weights: write the model's weights, in the server's dtype. False: it begins with random ones, of which nothing is
            written, and a trainer's first weight sync replaces them.
        timeout_s: deadline of the start, in seconds.
        returns_experts: completions carry the experts of a mixture.
    """
    url = urlsplit(config.server.urls[0])
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "host": url.hostname,
        "dtype": recipe.train.precision,
        "max_model_len": recipe.rollout.max_context_tokens,
        "max_num_seqs": config.max_batch_size or recipe.rollout.live_episodes(recipe.rollout.num_groups),
        "max_num_batched_tokens": max(config.max_prefill_tokens, recipe.rollout.max_context_tokens),
        "load_format": "auto" if with_weights else "dummy",
    }
    options |= config.vllm
    lora = recipe.model.lora
    adapters = None if lora is None or lora.merge else Adapters(rank=lora.rank, layers=tuple(adapted_layers(model)))
    dtype = parse_dtype(options["dtype"], model)
    if with_weights:
        export_model(model, tokenizer, folder / "model", dtype=dtype)
    else:
        write_config(model, tokenizer, folder / "model")
    return start_server(
        folder / "model",
        port=url.port or 80,
        log=folder / "server.log",
        options=adapter_arguments(adapters, dtype, model=model)
        | (routed_experts_arguments() if returns_experts else {})
        | options,
        timeout_s=timeout_s,
    )
