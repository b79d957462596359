"""Rewards of a `TaskEnv`: functions of what was said, named in a recipe, with weights; and those that come with agentrl."""
