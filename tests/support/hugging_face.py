"""A small model as save_pretrained leaves it, with a chat template of its own."""

from pathlib import Path

import torch

from agentrl.chat import train_tokenizer
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from tests.support.runs import SIZES

TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool.function.name + '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and REWRITTEN %}{{- '...' }}{%- else %}{{- message.content or '' }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def hugging_face_folder(path: Path, *, rewrites: bool) -> str:
    """A model as `save_pretrained` leaves it, whose template ends every turn and may blank out earlier answers."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([], vocab_size=261)
    rewritten = "loop.index < messages | length - 2" if rewrites else "false"
    tokenizer.chat_template = TEMPLATE.replace("REWRITTEN", rewritten)
    tokenizer.save_pretrained(path)
    make_local_model(LocalModelConfig(**SIZES), tokenizer).save_pretrained(path)
    return str(path)
