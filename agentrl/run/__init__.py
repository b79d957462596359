"""A recipe becomes a run: `build` makes the parts, `loop` trains them, `resume` knows the checkpoints."""
