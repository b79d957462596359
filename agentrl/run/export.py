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
from agentrl.policy.export import export_adapter, export_model, stop_at
from agentrl.policy.lora import adapted_layers, add_lora
from agentrl.policy.model import Policy, load_pretrained, make_local_model, open_config
from agentrl.recipe.config import Recipe
from agentrl.report.card import write_card
from agentrl.report.folder import RunFolder
from agentrl.run.build import Parts
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
    if recipe.model.name_or_path is not None:
        # Without `model.attention`, whose package may be missing: nothing attends.
        model, tokenizer = load_pretrained(recipe.model.name_or_path)
        if dtype is None and recipe.model.lora is None:  # rounding would take most of a young adapter away
            dtype = open_config(recipe.model.name_or_path, field="model.name_or_path")[1].dtype
        freeze_towers(model)  # as in training: a sharded checkpoint has none of what is frozen
    else:
        tokenizer = load_tokenizer(run.tokenizer)
        model = make_local_model(recipe.model.local, tokenizer)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    elif only_adapter:
        raise ConfigError("this run trains no adapter (model.lora)")
    with checkpoint_errors(checkpoint):
        load_weights(Policy(model), checkpoint)

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


def serve(
    parts: Parts, config: VLLMServerConfig, folder: Path, *, timeout_s: float, returns_experts: bool = False
) -> Server:
    """Start a vLLM server at the address of `config`; the model and the server's log go into `folder`."""
    recipe, url = parts.recipe, urlsplit(config.server.urls[0])
    folder.mkdir(parents=True, exist_ok=True)
    export_model(parts.policy.model, parts.tokenizer, folder / "model")
    options: dict[str, Any] = {
        "host": url.hostname,
        "dtype": recipe.train.precision,
        "max_model_len": recipe.rollout.max_context_tokens,
        "max_num_seqs": config.max_batch_size,
        "max_num_batched_tokens": max(config.max_prefill_tokens, recipe.rollout.max_context_tokens),
    }
    options |= config.vllm
    lora, model = recipe.model.lora, parts.policy.model
    adapters = None if lora is None or lora.merge else Adapters(rank=lora.rank, layers=tuple(adapted_layers(model)))
    dtype = parse_dtype(options["dtype"], model)
    return start_server(
        folder / "model",
        port=url.port or 80,
        log=folder / "server.log",
        options=adapter_arguments(adapters, dtype, model=model)
        | (routed_experts_arguments() if returns_experts else {})
        | options,
        timeout_s=timeout_s,
    )
