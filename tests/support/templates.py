"""A chat template like Qwen's, changed in one place or another, and a tokenizer that has it."""

from typing import Any

from agentrl.chat import train_tokenizer

CALL = """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}"""


QWEN = (
    """
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role in ['user', 'system'] %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
"""
    + CALL
    + """{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)


THINKS = (
    "{%- for message in messages %}",
    """{%- set last = namespace(user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}""",
)
"""As Qwen3's template: thoughts are kept through the results of tools, and dropped when a user speaks again."""


THOUGHT = (
    "assistant\n' + message.content }}",
    """assistant\n' }}{%- if (message.reasoning_content or loop.last) and loop.index0 > last.user %}
{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- message.content }}""",
)


PROMPTS_THOUGHT = ("prompt %}{{- '<|im_start|>assistant\n'", "prompt %}{{- '<|im_start|>assistant\n<think>\n'")


def tokenizer(template: str | None) -> Any:
    made = train_tokenizer(["user\nassistant\n"], vocab_size=270)
    made.chat_template = template
    return made


def changed(*pairs: tuple[str, str]) -> str:
    template = QWEN
    for found, replacement in pairs:
        assert found in template
        template = template.replace(found, replacement)
    return template
