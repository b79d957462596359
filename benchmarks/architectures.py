"""Three steps of a tool environment on a tiny random model of each architecture, with its family's tokens and chat template.

    python -m benchmarks.architectures --out benchmarks/results/DATE-architectures.md

Prints how far the engine's log-probabilities are from the trainer's, with each engine, and in its own words what cannot run.
"""

import argparse
import datetime as dt
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from tests.support.architectures import ARCHITECTURES, TEMPLATES, recipe, write_model


def _train(name: str, engine: str) -> dict[str, Any]:
    """Train with `agentrl train`; return what it left behind, or its last words."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, run_dir = Path(temporary, "model"), Path(temporary, "run")
        write_model(name, folder)
        file = Path(temporary, "recipe.yaml")
        file.write_text(yaml.safe_dump(recipe(folder, run_dir, engine=engine)), encoding="utf-8")
        begin = time.perf_counter()
        command = [sys.executable, "-m", "agentrl", "train", str(file)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        found: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        if done.returncode:
            return {**found, "why_not": _last_words(done.stdout + done.stderr)}
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if row["step"] > 0]
        return {
            **found,
            "nats": max(row["first/engine_difference"] for row in steps if "first/engine_difference" in row),
            "turns": sum(row["episode/turns"] for row in steps) / len(steps),
        }


def _last_words(output: str) -> str:
    """Return what `agentrl train` said in the end, and which module was missing where it says so."""
    lines = output.strip().splitlines()
    words = next((line for line in lines[::-1] if line.startswith("agentrl:")), lines[-1]).removeprefix("agentrl: ")
    missing = re.search(r"No module named '\w+'", output)
    return f"{words} ({missing[0]})" if missing else words


def _describe(name: str) -> dict[str, str]:
    """Return what a run would choose for a model: renderer and layout."""
    from agentrl.policy.layout import choose_layout
    from agentrl.policy.model import load_pretrained
    from agentrl.recipe.config import Recipe

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(name, folder)
        model, tokenizer = load_pretrained(str(folder))
        given = Recipe.model_validate(recipe(folder, folder / "run"))
        renderer: Any = given.chat.build(tokenizer, name=name)
        kind = type(renderer).__name__
        form = getattr(getattr(getattr(renderer, "facts", None), "form", None), "name", None)
        template = f"{TEMPLATES[name]}, tools by a file" if (folder / "tools.jinja").is_file() else TEMPLATES[name]
        return {
            "class": type(model).__name__,
            "template": template,
            "renderer": f"{kind}, calls: {form}" if form else kind,
            "layout": choose_layout(model, "auto")[0],
        }


def _cell(found: dict[str, Any]) -> str:
    return found.get("why_not") or f"{found['nats']:.1e} ({found['turns']:.1f} turns, {found['seconds']:.0f} s)"


def main() -> None:
    """Train each, print the table, and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ARCHITECTURES)}; default: all")
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--out", type=Path, help="a Markdown file to write the table to")
    options = parser.parse_args()
    head = ["architecture", "class", "template", "renderer", "layout", *options.engines]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    found: dict[str, Any] = {}
    print(*lines, sep="\n", flush=True)
    for name in options.names or ARCHITECTURES:
        chosen = _describe(name)
        results = {engine: _train(name, engine) for engine in options.engines}
        found[name] = {**chosen, **results}
        lines.append(f"| {' | '.join([name, *chosen.values(), *map(_cell, results.values())])} |")
        print(lines[-1], flush=True)
    if options.out:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        title = f"# Architectures, {dt.date.today()} ({versions}, CPU)"
        options.out.write_text("\n".join([title, "", _ABOUT.strip(), "", *lines, ""]), encoding="utf-8")
    print(json.dumps(found))


_ABOUT = """
`python -m benchmarks.architectures`: a tiny random model of each architecture, with its family's control tokens and chat
template, trains three steps of `key_door` with `agentrl train` on the CPU. Under each engine: mean |log-probability of the
trainer - of the engine| over the sampled tokens of a step's first minibatch, in nats, the largest of the three steps (a run
ends where it is above 1e-3); turns of an episode, of at most three; and the seconds that the whole command took, on a machine
that did other work beside it. Or why it cannot run.

A model is warmed up for 60 steps on demonstrations, until it calls tools. All are models for tools: where the family's own
template has none (Gemma 3, Phi-3), `chat.template` names a file that writes calls as JSON between tags. TRL has no template of
Mistral's; this one is written after its `[INST]` form.
"""


if __name__ == "__main__":
    main()
