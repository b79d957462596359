"""A tiny random model of each architecture, with its family's tokens and chat template, and a recipe that trains it."""

from pathlib import Path
from typing import Any

import torch
import transformers

from agentrl.models.auto_classes import auto_class
from tests.support.families import FAMILIES, Family, family_of, make_tokenizer, templates_folder

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least that vLLM takes on a CPU
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_WINDOW = 32
"""Tokens that a sliding window sees: fewer than any dialogue has."""
_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "Qwen3.5": (
        "Qwen3_5Text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "Gemma 3": (
        "Gemma3Text",
        {
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "query_pre_attn_scalar": 32,
        },
    ),
    "Gemma 4": (
        "Gemma4Text",
        {
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "sliding_window": _WINDOW,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Mistral": ("Mistral", {"sliding_window": _WINDOW}),
    "gpt-oss": (
        "GptOss",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "GLM-4 MoE": (
        "Glm4Moe",
        {
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    "Granite": ("Granite", {"logits_scaling": 2.0, "head_dim": None, "hidden_size": 64}),
    "Phi-3": ("Phi3", {"head_dim": None, "hidden_size": 64}),
    "Gemma 3 with images": (
        "Gemma3",
        {"vision_config": _IMAGES, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": _WINDOW},
    ),
    "Gemma 4 with images": (
        "Gemma4",
        {
            "vision_config": {**_IMAGES, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 16},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Mistral 3": (
        "Mistral3",
        {"vision_config": {**_IMAGES, "model_type": "pixtral"}, "model_type": "mistral", "sliding_window": _WINDOW},
    ),
}
"""What transformers calls each, and what it has beyond a plain decoder: sliding windows, experts, a recurrent layer, images."""


_LISTED = """{{- bos_token }}
{%- set listed = namespace(tools='') %}
{%- if tools %}
{%- set listed.tools = 'Tools:\\n' + tools | tojson + '\\n' %}
{%- set listed.tools = listed.tools + 'To call one: <tool_call>{"name": NAME, "arguments": {}}</tool_call>\\n\\n' %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- ASSISTANT + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}{{- END + '\\n' }}
{%- else %}{{- USER }}
{%- if loop.first %}{{- listed.tools }}{%- endif %}
{%- if message.role == 'tool' %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{- message.content }}{%- endif %}
{{- END + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ASSISTANT }}{%- endif %}"""
_MISTRAL = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role in ['user', 'system'] %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}
{%- else %}{{- message.content or '' }}
{%- if message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{%- if not loop.first %}{{- ', ' }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}{{- ']' }}{%- endif %}{{- eos_token }}{%- endif %}
{%- endfor %}"""
_INSTRUCT = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)
_MISTRAL_FAMILY = Family(
    splits="o200k", bos="<s>", adds_bos=True, eos="</s>", pad="<pad>", unk="<unk>", special=_INSTRUCT
)
TEMPLATES = {
    "Llama": "llama3_1",
    "Qwen3": "qwen3",
    "Qwen3.5": "qwen3_5_think",
    "Gemma 3": "gemma3",
    "Gemma 4": "gemma4",
    "Mistral": "mistral",
    "gpt-oss": "gptoss",
    "GLM-4 MoE": "glm4moe",
    "Granite": "llama3_1",
    "Phi-3": "phi3",
    "Gemma 3 with images": "gemma3",
    "Gemma 4 with images": "gemma4",
    "Mistral 3": "mistral",
}
"""The chat template of each, by its name in TRL, which has none of Mistral's."""
_WITH_TOOLS = {
    "gemma3": {"USER": "'<start_of_turn>user\\n'", "ASSISTANT": "'<start_of_turn>model\\n'", "END": "'<end_of_turn>'"},
    "phi3": {"USER": "'<|user|>\\n'", "ASSISTANT": "'<|assistant|>\\n'", "END": "'<|end|>'"},
}
"""How a turn begins and ends where the family's own template has no tools: a file beside the model has them then."""


def tiny_model(name: str, *, vocab_size: int, **changes: Any) -> Any:
    """Return a model of an architecture with random weights, the same each time."""
    family, own = ARCHITECTURES[name]
    sizes = {**_SIZES, **own, "pad_token_id": 0, "vocab_size": vocab_size, **changes}
    torch.manual_seed(0)
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if "hidden_size_per_layer_input" in sizes:  # a table of embeddings beside the first
        sizes["vocab_size_per_layer_input"] = vocab_size
    if images := sizes.pop("vision_config", None):
        sizes = {"text_config": sizes, "vision_config": images, "tie_word_embeddings": sizes.pop("tie_word_embeddings")}
    config = getattr(transformers, f"{family}Config")(**sizes)
    return auto_class(config).from_config(config)


def write_model(name: str, folder: Path) -> None:
    """Write a tiny model of an architecture with its family's tokenizer and template; `tools.jinja` where that has no tools."""
    template = TEMPLATES[name]
    if template == "mistral":
        tokenizer, text = make_tokenizer(_MISTRAL_FAMILY), _MISTRAL
    else:
        tokenizer = make_tokenizer(FAMILIES[family_of(template)])
        text = (templates_folder() / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = text
    tokenizer.save_pretrained(folder)
    if words := _WITH_TOOLS.get(template):
        text = _LISTED
        for word, said in words.items():
            text = text.replace(word, said)
        (folder / "tools.jinja").write_text(text, encoding="utf-8")
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    tiny_model(name, vocab_size=len(tokenizer), **ids).save_pretrained(folder)


def recipe(folder: Path, run_dir: Path, *, engine: str = "transformers") -> dict[str, Any]:
    """Return a recipe of three steps of `key_door` on the model of a folder.

    Warmed up until it calls tools, which a random policy would never do; advantages are noise, since it earns next to nothing.
    """
    tools = folder / "tools.jinja"
    return {
        "run_dir": str(run_dir),
        "env": {"id": "key_door"},
        "model": {"name_or_path": str(folder)},
        "chat": {"template": str(tools)} if tools.is_file() else {},
        "engine": {"name": engine, "max_batch_size": 8},
        "warmup": {"steps": 60, "num_demonstrations": 32, "batch_size": 4, "learning_rate": 1e-2},
        "rollout": {
            "num_groups": 2,
            "group_size": 2,
            "max_turns": 3,
            "max_turn_tokens": 48,
            "max_context_tokens": 2048,
        },
        "credit": {"scheme": "tests.support.runs:Noise"},
        "train": {"steps": 3, "device": "cpu", "learning_rate": 1e-4},
        "evaluation": {"num_tasks": 1},
        "report": {"rollouts_every": 1},
    }
