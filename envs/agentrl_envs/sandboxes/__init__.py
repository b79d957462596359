"""Sandboxes that come with agentrl, in which code of a model runs; one file each."""
