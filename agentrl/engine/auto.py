"""Engine of recipes that name none: the one expected to be fastest."""

from agentrl.engine.base import Engine, EngineContext
from agentrl.engine.vllm.common import adapter_arguments, is_installed, is_reloadable
from agentrl.engine.vllm.engine import VLLMConfig
from agentrl.errors import ConfigError
from agentrl.models.auto_classes import head_size, layer_configs

_LARGE = 10_000_000
"""Parameters from which on vLLM outruns the transformers engine on a CPU (benchmarks/vllm_throughput.py)."""


class AutoConfig(VLLMConfig):
    """vLLM if it is installed and one process trains, on a GPU or with a large model; else `transformers`."""

    name: str = "auto"

    def build(self, context: EngineContext) -> Engine:
        """Return the engine that fits the model and the machine.

        Raises:
            ConfigError: if a field is set that the chosen engine does not have.
        """
        if is_vllm_faster(context):
            return super().build(context)
        from agentrl.engine.transformers.engine import TransformersConfig  # here: reading a recipe imports no models

        if given := [name for name in ("sleep", "vllm") if getattr(self, name)]:
            raise ConfigError(
                f"engine.{given[0]}: engine.name: auto chooses transformers, which has no such option; remove it, or set "
                "engine.name: vllm"
            )
        fields = {name: getattr(self, name) for name in TransformersConfig.model_fields if name != "name"}
        return TransformersConfig(**fields).build(context)


def is_vllm_faster(context: EngineContext) -> bool:
    """Return whether vLLM can sample for this run and is expected to be faster."""
    if context.shard.num_processes > 1 or not is_installed() or not is_reloadable(context.model.config):
        return False
    try:
        adapter_arguments(context.adapters, context.dtype, model=context.model)
    except ConfigError:
        return False
    if context.device.type == "cuda":
        return True
    if context.returns_experts:  # not supported by vLLM on a CPU
        return False
    # vLLM on a CPU needs heads of at least 32.
    model, config = context.model, context.model.config.get_text_config()
    is_large = sum(parameter.numel() for parameter in model.parameters()) >= _LARGE
    return is_large and min(map(head_size, layer_configs(config))) >= 32
