"""Reads random outputs in every form of tool calls, and looks for exceptions and for calls that nobody wrote.

    python -m benchmarks.fuzz_forms [--outputs 120000] [--seed 0] [--characters 10000000]

A third of the outputs are parts of calls glued at random, a third are calls in order, with thoughts and text around them,
and a third are those, cut, doubled and overwritten in places. Of each output, read as it is and as the rest of an open
thought: no exception; the message is plain JSON data; without the opening tag of a call there is none; a call's name and
every word of its arguments are in the text, and no name is called more often than it is written. A text within a thought
that is not closed holds no call.

Then one part after the other is repeated up to 200,000 characters, alone and after the beginning of a call, and what took
longest is repeated up to `characters`. Seconds are of the processor.
"""

import argparse
import json
import random
import time
from collections import Counter
from itertools import islice

from agentrl.chat.forms import FORMS
from agentrl.chat.forms.form import CallForm
from tests.support import response_templates
from tests.support.hostile_forms import FAMILIES, TOOLS, faults, outputs


def fuzz(form: CallForm, name: str, num_outputs: int, seed: int) -> Counter[str]:
    """Return what was found in outputs in the form of that name, by its name, and how many calls there were."""
    family, tally, begin = FAMILIES[name], Counter[str](), time.process_time()
    for text in islice(outputs(family, random.Random(f"{name} {seed}")), num_outputs):
        for is_thinking in (False, True):
            try:
                message = form.parse(text, TOOLS, is_thinking=is_thinking)
            except Exception as error:  # noqa: BLE001 - what is looked for
                tally[f"fault: {type(error).__name__} {error} of {text!r}"[:300]] += 1
                continue
            for fault in faults(message, text, family):
                tally[f"fault: {fault} in {text!r}"[:300]] += 1
            found = [call["function"] for call in message.get("tool_calls", ())]
            if is_thinking and found and family.end_thought not in text:
                tally[f"fault: a call within an open thought of {text!r}"[:300]] += 1
            tally["calls"] += sum(bool(called["name"]) for called in found)
            tally["malformed"] += sum(not called["name"] for called in found)
    tally["seconds"] = round(time.process_time() - begin)
    return tally


def slowest(form: CallForm, num_chars: int) -> tuple[float, str]:
    """Return the seconds for the repetition that takes longest, and its beginning."""
    family = FAMILIES[form.name]
    call = family.write([("take_it", {"what": "x"})])
    half = call[: call.index("x")]
    beginnings = ("", half, family.write([("look", {})]), family.think[0])
    pieces = (*family.pieces, half, call, half + family.pieces[-1], " ", "\\", '"', "[", "{", "',", '\\"')
    found = [(_seconds(form, b, p, 200_000), b, p) for b in beginnings for p in pieces]
    _, beginning, piece = max(found)
    return _seconds(form, beginning, piece, num_chars), f"{beginning}{piece}{piece}"


def _seconds(form: CallForm, beginning: str, piece: str, num_chars: int) -> float:
    text = beginning + piece * (num_chars // len(piece))
    begin = time.process_time()
    form.parse(text, TOOLS, is_thinking=False)
    return time.process_time() - begin


def main() -> None:
    """Print a table, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=120_000, help="over all forms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--characters", type=int, default=10_000_000, help="0: no times")
    given = parser.parse_args()
    forms = [(form.name, form.name, form) for form in FORMS]
    # Llama's has no thoughts, and reads a call anywhere in a text: tests/chat/forms/test_response_template.py.
    forms += [(f"{f.name} ({name})", name, f) for name, f in response_templates.FORMS.items() if name != "llama-json"]
    each, wrong, figures = given.outputs // len(forms) + 1, list[str](), dict[str, dict[str, int]]()
    print("| form | outputs | calls | malformed calls | faults | seconds |\n|---|---|---|---|---|---|")
    for label, name, form in forms:
        tally = fuzz(form, name, each, given.seed)
        faults_found = Counter({f"{label}: {found}": n for found, n in tally.items() if found.startswith("fault: ")})
        wrong += faults_found
        row = {"outputs": each, "calls": tally["calls"], "malformed": tally["malformed"]}
        figures[label] = row | {"faults": faults_found.total(), "seconds": tally["seconds"]}
        print(f"| {label} | {' | '.join(f'{n:,}' for n in figures[label].values())} |", flush=True)
    print("\n".join(wrong[:20]))
    for form in FORMS if given.characters else ():
        seconds, text = slowest(form, given.characters)
        print(f"{form.name}: {seconds:.1f} s for {given.characters:,} characters of {text!r}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
