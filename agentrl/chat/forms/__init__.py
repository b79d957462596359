"""The text forms in which families of models write tool calls and thoughts."""

from agentrl.chat.forms.channels import ATEM, HARMONY
from agentrl.chat.forms.code import LFM, LFM_RAW, PYTHONIC
from agentrl.chat.forms.form import CallForm
from agentrl.chat.forms.gemma4 import GEMMA4
from agentrl.chat.forms.hermes import HERMES
from agentrl.chat.forms.llama import LLAMA
from agentrl.chat.forms.mistral import MISTRAL
from agentrl.chat.forms.response_template import ResponseTemplateForm
from agentrl.chat.forms.sections import DEEPSEEK, DEEPSEEK_V3_1, KIMI
from agentrl.chat.forms.xml import GLM, MINIMAX, QWEN_XML

FORMS: tuple[CallForm, ...] = (
    HERMES,
    QWEN_XML,
    GLM,
    GEMMA4,
    HARMONY,
    ATEM,
    LFM,
    LFM_RAW,
    MISTRAL,
    DEEPSEEK,
    DEEPSEEK_V3_1,
    KIMI,
    MINIMAX,
    LLAMA,
    PYTHONIC,
)
"""In the order in which they are tried. The last two have no tags: any text might be theirs."""

__all__ = ["FORMS", "HERMES", "CallForm", "ResponseTemplateForm"]
