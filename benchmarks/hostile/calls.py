"""Malformed tool calls, ten thousand for each form, parsed."""

import random
import time
from itertools import islice
from pathlib import Path

from agentrl.chat.forms import FORMS
from benchmarks.hostile.cases import CaseCounts
from tests.support.hostile_forms import FAMILIES, TOOLS, faults, outputs

NUM = 10_000
SLOW_S = 1.0


def try_calls(folder: Path, every: int) -> CaseCounts:
    """Parse whatever mutilated calls a model may write: no exception, no invented call, nothing that no file can hold."""
    tally = CaseCounts("a mutilated tool call, 10,000 for each form, parsed")
    for form in FORMS:
        for text in islice(outputs(FAMILIES[form.name], random.Random(form.name)), 0, NUM, every):
            begin = time.perf_counter()
            try:
                wrong = "; ".join(faults(form.parse(text, TOOLS, is_thinking=False), text, FAMILIES[form.name]))
            except Exception as error:  # noqa: BLE001 - the kind of harm that is looked for
                wrong = f"{type(error).__name__}: {error}"
            if not wrong and (seconds := time.perf_counter() - begin) > SLOW_S:
                wrong = f"took {seconds:.1f} s"
            tally.add(f"{form.name}: {text[:200]!r}", "read, or answered to the model", wrong=wrong)
    return tally
