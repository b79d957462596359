"""The model in training: log-probabilities of trained tokens, on rows, packed or on a token tree; adapters; its export."""
