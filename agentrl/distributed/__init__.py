"""Several processes that train one run: what they tell each other, weights shared out among them, whole checkpoints."""
