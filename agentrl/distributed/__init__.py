"""Several ranks that train one run: communication, sharded weights, whole checkpoints."""
