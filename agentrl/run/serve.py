"""A vLLM server for a recipe."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.engine.vllm_experts import arguments_to_tell
from agentrl.engine.vllm_launch import Server, start_server
from agentrl.engine.vllm_server_config import VLLMServerConfig
from agentrl.policy.export import export_model
from agentrl.run.build import Parts


def serve(
    parts: Parts, config: VLLMServerConfig, folder: Path, *, timeout_s: float, tells_experts: bool = False
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
    return start_server(
        folder / "model",
        port=url.port or 80,
        log=folder / "server.log",
        options=options | (arguments_to_tell() if tells_experts else {}) | config.vllm,
        timeout_s=timeout_s,
    )
