"""The recipe's section `model`. Nothing here takes long to import."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.recipe.plugin import MayChange
from agentrl.types import Amount, Count, between

Layout = Literal["tree", "packed", "padded"]
"""`tree`: shared prefixes are computed once. `packed`: short rows are concatenated. `padded`: rows are stacked."""


class LocalModelConfig(BaseModel):
    """A small Qwen3 with random weights and a tokenizer trained on the environment's own dialogues."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: Count = 128
    """Width of the hidden states: an even number for each of `num_heads`."""
    num_layers: Count = 2
    """Transformer blocks."""
    num_heads: Count = 4
    """Query heads of each attention layer."""
    num_kv_heads: Count = 2
    """Key and value heads, each shared by `num_heads / num_kv_heads` query heads."""
    intermediate_size: Count = 384
    """Width of the feed-forward layers."""
    max_positions: Amount = 4096
    """Longest row the model takes, in tokens; `rollout.max_context_tokens` must fit."""
    initializer_std: Annotated[float, Field(gt=0), between(1e-3, 10)] = 0.08
    """Standard deviation of the initial weights."""
    vocab_size: int = Field(default=448, ge=261, le=1_000_000)
    """Largest number of tokenizer entries: 256 bytes, 5 control tokens, and tokens merged from them."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} does not divide hidden_size: {self.hidden_size}; "
                f"set hidden_size to a multiple of {2 * self.num_heads}"
            )
        if (size := self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size: {self.hidden_size} over num_heads: {self.num_heads} gives heads of odd size {size}, which "
                f"rotary positions cannot turn; set hidden_size to a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads: {self.num_heads}; "
                "set num_kv_heads to 1, num_heads, or another divisor of it"
            )
        return self


class LoraSettings(BaseModel):
    """Low-rank adapters, which are trained in place of the model's own weights.

    There is no dropout: it would make importance ratios random.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: Count = 16
    """Rank of the change of each weight."""
    alpha: Amount = 32
    """Scale of the change: `alpha / rank`."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers to adapt, by the ends of their names: `[q_proj, v_proj]`. `all-linear`: all but the head. The experts
    and routers of a mixture stay as they are."""
    merge: Annotated[bool, MayChange()] = False
    """Let an engine in half precision sample from weights with the adapters merged in, which is faster and works for every
    model. Rounding then removes most of a young adapter: `mismatch/lost_change` is the share. In float32 adapters are merged
    anyway, and nothing is lost."""


class ModelConfig(BaseModel):
    """The model to train."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name_or_path: str | None = None
    """A Hugging Face model: a folder, or a name on the hub. None: a small one is made locally, see `local`."""
    local: LocalModelConfig = LocalModelConfig()
    """The model to make if `name_or_path` is None."""
    attention: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] | None = None
    """Attention implementation of transformers, unless rows are laid out as a tree. None: sdpa if the model has it,
    else eager (gpt-oss). The last three train on GPUs alone; with flash_attention_2 and 3, which have no float32 to prove a
    layout in, rows are padded."""
    lora: LoraSettings | None = None
    """Train low-rank adapters in place of the weights. None: train the weights. An empty section: adapters of default size."""

    @model_validator(mode="after")
    def _has_weights_to_adapt(self) -> Self:
        if self.lora is not None and self.name_or_path is None:
            raise ValueError(
                "lora: a model with random weights has nothing to adapt; set model.name_or_path, or leave lora out"
            )
        return self
