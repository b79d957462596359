"""Runs as a page of HTML: curves, rollouts token by token, evaluations, warnings."""
