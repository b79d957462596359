"""A run's newest weights, as other programs read them."""

from functools import partial
from pathlib import Path

import torch

from agentrl.chat import load_tokenizer
from agentrl.config import Recipe
from agentrl.distributed.checkpoints import checkpoint_errors, step_of
from agentrl.engine.model_class import auto_class
from agentrl.errors import ConfigError
from agentrl.learn.policy_state import load_weights
from agentrl.policy.export import export_adapter, export_model
from agentrl.policy.generation import stop_at
from agentrl.policy.lora import add_lora
from agentrl.policy.model import Policy, load_pretrained, make_local_model
from agentrl.policy.towers import freeze_towers
from agentrl.report.card import write_card
from agentrl.report.folder import RunFolder
from agentrl.run.resume import newest_checkpoint


def export(
    recipe: Recipe,
    run: RunFolder,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    only_adapter: bool = False,
    name: str | None = None,
) -> None:
    """Write a run's newest policy as a Hugging Face folder, or its adapters as a folder of peft's, with a model card.

    Neither environment nor engine is built.

    Args:
        recipe: of the run.
        run: whose newest checkpoint it is.
        folder: to make.
        dtype: of the weights. None: as they were trained.
        only_adapter: write the adapters alone.
        name: under which the card says that the model is loaded. None: that of the folder.

    Raises:
        ConfigError: when the run has no checkpoint, or none that fits the recipe, or trains no adapter to write.
    """
    newest = newest_checkpoint(run)
    if recipe.model.name_or_path is not None:
        model, tokenizer = load_pretrained(
            recipe.model.name_or_path
        )  # attention's package may not be there: nothing attends
        freeze_towers(model)  # as in training: a sharded checkpoint has none of what is frozen
    else:
        tokenizer = load_tokenizer(run.tokenizer)
        model = make_local_model(recipe.model.local, tokenizer)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    elif only_adapter:
        raise ConfigError("this run trains no adapter (model.lora)")
    with checkpoint_errors(newest):
        load_weights(Policy(model), newest)

    card = partial(
        write_card,
        run=run,
        config=recipe.model_dump(mode="json"),
        name=name or folder.resolve().name,
        step=step_of(newest),
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
