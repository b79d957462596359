"""Train as several processes, one for each GPU, or as here on the CPU: python examples/several_processes.py

From the command line: agentrl launch --processes 2 calculator
"""

import sys

import agentrl


def main() -> None:
    run = agentrl.train("calculator", processes=2, train={"steps": 20}, overrides=sys.argv[1:])
    last = run.metrics[-1]
    print(f"after {last['step']:.0f} steps: {last.get('eval/success', 0.0):.1%} solved")


if __name__ == "__main__":
    main()
