"""Train a Hugging Face model: python examples/hugging_face_model.py [NAME_OR_FOLDER]

The default, of 600 million parameters, is downloaded, and needs a GPU of 24 GB (`agentrl plan` counts what a recipe needs);
`agentrl chat NAME` shows beforehand how the model's dialogues become tokens.
"""

import sys

import agentrl


def main() -> None:
    name, overrides = "Qwen/Qwen3-0.6B", sys.argv[1:]
    if overrides and not overrides[0].startswith("--"):
        name, *overrides = overrides
    run = agentrl.train(
        {
            "env": {"id": "calculator"},
            "rollout": {
                "num_groups": 8,
                "group_size": 8,
                "max_turns": 4,
                "max_turn_tokens": 512,
                "max_context_tokens": 4096,
            },
            "credit": {
                "scheme": "turn_return",
                "baseline": "turn",
                "leave_one_out": False,
                "gamma": 0.5,
                "normalize": "std",
            },
            "train": {
                "steps": 50,
                "learning_rate": 1e-6,
                "precision": "bfloat16",
                "gradient_checkpointing": True,
                "max_tokens_per_micro_batch": 4096,
            },
            "evaluation": {"num_tasks": 64, "every": 10},
        },
        model=name,
        overrides=overrides,
    )
    print(f"weights for other programs: {run.export(run.path / 'exported')}")


if __name__ == "__main__":
    main()
