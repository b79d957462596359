"""Which class of transformers a configuration is of: for the trainer, and for whoever reads what a server runs."""

from typing import Any


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes a language model of a configuration; some are known with images only."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WITHOUT_IMAGES

    return AutoModelForCausalLM if config.model_type in WITHOUT_IMAGES else AutoModelForImageTextToText
