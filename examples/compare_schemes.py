"""Compare two credit schemes over the same seeds: python examples/compare_schemes.py

`agentrl compare` does this from the command line, with intervals and a page to look at.
"""

import statistics
import sys

import agentrl

SCHEMES: dict[str, dict[str, object]] = {
    "uniform advantages": {"scheme": "uniform"},
    "GiGPO": {"scheme": "gigpo", "gamma": 0.8},
}
SEEDS = (0, 1, 2)


def solved(credit: dict[str, object], seed: int) -> float:
    run = agentrl.train("corridor", credit=credit, seed=seed, quiet=True, overrides=sys.argv[1:])
    return run.metrics[-1].get("eval/success", 0.0)


def main() -> None:
    found = {name: [solved(credit, seed) for seed in SEEDS] for name, credit in SCHEMES.items()}
    for name, shares in found.items():
        print(f"{name}: {statistics.mean(shares):.1%} solved ({', '.join(f'{share:.1%}' for share in shares)})")
    differences = [b - a for a, b in zip(*found.values(), strict=True)]
    spread = statistics.stdev(differences) / len(differences) ** 0.5
    print(f"difference, seed by seed: {statistics.mean(differences):+.1%}, standard error {spread:.1%}")


if __name__ == "__main__":
    main()
