"""Messages to token ids and back. What was sampled is kept as sampled: nothing is ever decoded and tokenized again."""

from agentrl.chat.chatml import ChatMLRenderer
from agentrl.chat.dialogue import Dialogue
from agentrl.chat.renderer import ChatConfig, Renderer, load_renderer
from agentrl.chat.template import TemplateRenderer
from agentrl.chat.tokenizer import load_tokenizer, train_tokenizer
from agentrl.chat.tool_calls import format_tool_call, parse_assistant

__all__ = [
    "ChatConfig",
    "ChatMLRenderer",
    "Dialogue",
    "Renderer",
    "TemplateRenderer",
    "format_tool_call",
    "load_renderer",
    "load_tokenizer",
    "parse_assistant",
    "train_tokenizer",
]
