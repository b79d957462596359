"""Tokenizers' own `response_template`s, for three families of `tests.support.hostile_forms`."""

from typing import Any

from agentrl.chat import ResponseTemplateForm

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
_SOME: dict[str, Any] = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
_HERMES = _SOME | {
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    }
}
_XML = _SOME | {
    "fields": {
        "thinking": {"open_pattern": r"(?=[\s\S]*?</think>)", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": _CALL,
        },
        "content": {"content": "text"},
    }
}
_LLAMA = _SOME | {
    "fields": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}<\|eot_id\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        "content": {"close_pattern": r"<\|eot_id\|>\s*", "content": "text"},
    }
}
FORMS = {
    "hermes": ResponseTemplateForm(_HERMES),
    "qwen-xml": ResponseTemplateForm(_XML),
    "llama-json": ResponseTemplateForm(_LLAMA, ends=("<|eot_id|>",)),
}
"""By the form of calls that they read."""
