"""Wrappers that a recipe puts around its environment (`env.wrappers`), each by its entry point in `agentrl.wrappers`."""
