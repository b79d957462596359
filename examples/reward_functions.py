"""Train on a table of tasks with reward functions, without a class: python examples/reward_functions.py

From the command line, with the table in a file: agentrl train examples/tasks.yaml
"""

import sys

import agentrl

ROWS = [
    {"question": f"{a} {b} {c}: the largest?", "answer": str(max(a, b, c))}
    for a in range(10)
    for b in range(10)
    for c in range(10)
    if len({a, b, c}) == 3
]


def right(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


def is_digit(completion: str) -> float:
    return float(completion.strip().isdigit())


def main() -> None:
    agentrl.train(
        "calculator",
        env={
            "id": "tasks",
            "options": {
                "tasks": ROWS,
                "prompt": "question",
                "answer": "answer",
                "rewards": [right, {"reward": is_digit, "weight": 0.1}],
            },
        },
        warmup={"steps": 150, "num_demonstrations": 1000},
        rollout={"max_turns": 1, "max_turn_tokens": 8, "max_episode_tokens": 8, "max_context_tokens": 128},
        credit="uniform",
        loss={"unit": "turn"},
        train={"steps": 30},
        evaluation={"num_tasks": 64},
        overrides=sys.argv[1:],
    )


if __name__ == "__main__":
    main()
