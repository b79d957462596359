"""The text forms in which families of models write tool calls and thoughts."""

from agentrl.chat.forms.code import GEMMA4, LFM, LFM_RAW, PYTHONIC
from agentrl.chat.forms.form import CallForm
from agentrl.chat.forms.json_calls import DEEPSEEK, DEEPSEEK_V3_1, HERMES, KIMI, LLAMA, MISTRAL
from agentrl.chat.forms.response_template import ResponseTemplateForm
from agentrl.chat.forms.tagged import ATEM, GLM, HARMONY, MINIMAX, QWEN_XML

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
