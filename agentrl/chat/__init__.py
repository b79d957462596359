"""Messages to token ids and back. What was sampled is kept as sampled: nothing is ever decoded and tokenized again."""

from agentrl.chat.auto import AutoConfig
from agentrl.chat.chatml import ChatMLConfig, ChatMLRenderer
from agentrl.chat.dialogue import Dialogue, TurnTokens
from agentrl.chat.renderer import Renderer, RendererConfig
from agentrl.chat.template import TemplateConfig, TemplateRenderer
from agentrl.chat.tokenizer import load_tokenizer, train_tokenizer
from agentrl.chat.tool_calls import format_tool_call, parse_assistant

__all__ = [
    "AutoConfig",
    "ChatMLConfig",
    "ChatMLRenderer",
    "Dialogue",
    "Renderer",
    "RendererConfig",
    "TemplateConfig",
    "TemplateRenderer",
    "TurnTokens",
    "format_tool_call",
    "load_tokenizer",
    "parse_assistant",
    "train_tokenizer",
]
