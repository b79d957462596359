"""What scripts and notebooks call, and the command line too: train, evaluate, play."""
