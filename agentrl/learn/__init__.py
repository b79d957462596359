"""Learning: credit and log-probabilities to a loss, a loss to new weights."""
