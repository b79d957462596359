"""The engine that samples with transformers in the process."""
