"""Credit schemes, one file each; `agentrl credit` lists them."""
