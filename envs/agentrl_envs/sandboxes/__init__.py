"""Where code of a model runs: the sandboxes that come with agentrl, one file each."""
