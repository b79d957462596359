"""Calls whose arguments are text between tags of their own: the forms of Qwen3.5, Nemotron 3, GLM and MiniMax."""

import re
from dataclasses import dataclass

from agentrl.chat.forms.form import NAME, Function, function, malformed
from agentrl.chat.forms.schema import typed
from agentrl.chat.forms.tagged import Sampled, TaggedForm
from agentrl.chat.renderer import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """The tags of calls within a block.

    The value of an argument is all text up to the first tag that ends it, whatever other tags it holds.
    """

    call: re.Pattern[str]
    """Begins a call; its group is the name."""
    argument: re.Pattern[str]
    """Begins an argument; its group is the key."""
    end_argument: str
    end_call: re.Pattern[str]
    end_block: re.Pattern[str]
    """Ends the block. The end of the text may too, where `end_call` has shown that the call is whole."""
    close: str
    """Ends a block that is malformed."""
    has_lines: bool = False
    """A value stands on lines of its own."""

    def read(self, sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:
        """Return the calls of a block and the place after it; a block with anything else in it is one malformed call."""
        functions, position = list[Function](), start
        while call := self.call.match(sampled.text, position):
            found, position = self._call(sampled, call, tools)
            if found is None:
                break
            functions.append(found)
        else:
            if functions and (end := self.end_block.match(sampled.text, position)):
                return functions, end.end()
        stop = sampled.find(self.close, position)
        return [malformed(sampled.text[start:stop])], stop + len(self.close)

    def _call(self, sampled: Sampled, call: re.Match[str], tools: Tools) -> tuple[Function | None, int]:
        """Return a call and the place after it; None and the place of what is not in order."""
        name, position, arguments = call[1], call.end(), dict[str, object]()
        while begin := self.argument.match(sampled.text, position):
            key, position = begin[1], begin.end()
            end = sampled.find(self.end_argument, position)
            if end == len(sampled.text) or key in arguments:
                return None, position
            text = sampled.text[position:end]
            try:
                arguments[key] = typed(text.removesuffix("\n") if self.has_lines else text, name, key, tools)
            except (ValueError, RecursionError):
                return None, end
            position = end + len(self.end_argument)
        if end_call := self.end_call.match(sampled.text, position):
            return function(name, arguments), end_call.end()
        return None, position


_KEY = r"([^<>\n]++)"
_QUOTED = r'"([^<>"\n]++)"'

_QWEN = CallTags(
    call=re.compile(rf"\s*+<function=({NAME})>"),
    argument=re.compile(rf"\s*+<parameter={_KEY}>\n?"),
    end_argument="</parameter>",
    end_call=re.compile(r"\s*+</function>"),
    end_block=re.compile(r"\s*+(?:</tool_call>|\Z)"),
    close="</tool_call>",
    has_lines=True,
)
_GLM = CallTags(
    call=re.compile(rf"\s*+({NAME})"),
    argument=re.compile(rf"\s*+<arg_key>{_KEY}</arg_key>\s*+<arg_value>"),
    end_argument="</arg_value>",
    end_call=re.compile(r"\s*+(?=</tool_call>)"),
    end_block=re.compile(r"</tool_call>"),
    close="</tool_call>",
)
_MINIMAX = CallTags(
    call=re.compile(rf'\s*+<invoke name="({NAME})">'),
    argument=re.compile(rf"\s*+<parameter name={_QUOTED}>"),
    end_argument="</parameter>",
    end_call=re.compile(r"\s*+</invoke>"),
    end_block=re.compile(r"\s*+(?:</minimax:tool_call>|\Z)"),
    close="</minimax:tool_call>",
)
ATEM_TAGS = CallTags(
    call=re.compile(rf'\s*+<atem:invoke name="({NAME})">'),
    argument=re.compile(rf"\s*+<atem:parameter name={_QUOTED}>"),
    end_argument="</atem:parameter>",
    end_call=re.compile(r"\s*+</atem:invoke>"),
    end_block=re.compile(r"\s*+(?:</atem:function_calls>|\Z)"),
    close="</atem:function_calls>",
)
"""Of Muse, whose messages have recipients."""

QWEN_XML = TaggedForm(name="qwen-xml", open="<tool_call>", close="</tool_call>", read=_QWEN.read, space="\n")
GLM = TaggedForm(name="glm", open="<tool_call>", close="</tool_call>", read=_GLM.read)
MINIMAX = TaggedForm(name="minimax", open="<minimax:tool_call>", close="</minimax:tool_call>", read=_MINIMAX.read)
