"""What every renderer must keep to, as one call: `check_renderer(MyRenderer(tokenizer))`."""

from typing import TYPE_CHECKING

from agentrl.errors import CheckError

if TYPE_CHECKING:
    from agentrl.chat.renderer import Renderer, Tools


def check_renderer(renderer: "Renderer", *, tools: "Tools | None" = None) -> None:
    """Raise with all that is wrong with a renderer; return where nothing is.

    The same dialogues are played as with a model's own template before a run (`agentrl.chat.proof.examine`).

    Args:
        renderer: what to check.
        tools: at least two, as in the first context of an episode, or none for a renderer without tools. None: two of ours.

    Raises:
        CheckError: one line for each thing that is wrong.
    """
    from agentrl.chat.proof import examine
    from agentrl.chat.turns import TOOLS

    findings = examine(renderer, tools=TOOLS if tools is None else tools)
    problems = dict.fromkeys(problem for finding in findings for problem in finding.problems)
    if problems:
        lines = "".join(f"\n- {problem}" for problem in problems)
        raise CheckError(f"renderer {type(renderer).__name__}:{lines}")
