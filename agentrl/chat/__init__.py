"""Messages to token ids and back. What was sampled is kept as sampled: nothing is ever decoded and tokenized again."""

from agentrl.chat.auto import AutoConfig
from agentrl.chat.chatml import ChatMLConfig, ChatMLRenderer
from agentrl.chat.forms import FORMS, CallForm, ResponseTemplateForm
from agentrl.chat.forms.json_calls import format_tool_call, parse_assistant
from agentrl.chat.renderer import (
    Description,
    Dialogue,
    HistoryConfig,
    Renderer,
    RendererConfig,
    TurnTokens,
    describe,
    stop_ids,
)
from agentrl.chat.template import TemplateConfig, TemplateRenderer
from agentrl.chat.tokenizer import load_tokenizer, local_folder, pretrained_tokenizer, train_tokenizer

__all__ = [
    "FORMS",
    "AutoConfig",
    "CallForm",
    "ChatMLConfig",
    "ChatMLRenderer",
    "Description",
    "Dialogue",
    "HistoryConfig",
    "Renderer",
    "RendererConfig",
    "ResponseTemplateForm",
    "TemplateConfig",
    "TemplateRenderer",
    "TurnTokens",
    "describe",
    "format_tool_call",
    "load_tokenizer",
    "local_folder",
    "parse_assistant",
    "pretrained_tokenizer",
    "stop_ids",
    "train_tokenizer",
]
