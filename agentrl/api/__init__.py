"""Train, evaluate and play from scripts and notebooks; the command line calls these too."""
