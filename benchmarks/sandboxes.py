"""How long one `exec` of each sandbox takes, where nothing is to be done: the fastest and the median.

    python -m benchmarks.sandboxes [--times 50]

The sandboxes take turns. Wall time, so that processes that are started count; the last line printed is JSON.
"""

import argparse
import json
import statistics
import time

from agentrl.env import Language, sandbox_config
from agentrl.errors import UserError

CASES: tuple[tuple[str, Language, str], ...] = (
    ("monty", "python", "print(1)"),
    ("bubblewrap", "python", "print(1)"),
    ("unsafe", "python", "print(1)"),
    ("bubblewrap", "sh", "echo 1"),
    ("unsafe", "sh", "echo 1"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    times = parser.parse_args().times
    boxes = {}
    for name, language, code in CASES:
        try:
            boxes[f"{name} ({language})"] = (sandbox_config(name).build(), language, code)
        except UserError as error:
            print(error)
    seconds: dict[str, list[float]] = {label: [] for label in boxes}
    for _ in range(times):
        for label, (box, language, code) in boxes.items():
            begin = time.perf_counter()
            result = box.exec(code, language=language)
            seconds[label].append(time.perf_counter() - begin)
            if result.output != "1\n":
                raise SystemExit(f"{label} said {result!r}")
    print("| sandbox | fastest | median |\n|---|---|---|")
    found = {label: {"fastest_s": min(took), "median_s": statistics.median(took)} for label, took in seconds.items()}
    for label, figures in found.items():
        print(f"| {label} | {1000 * figures['fastest_s']:.2g} ms | {1000 * figures['median_s']:.2g} ms |")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
