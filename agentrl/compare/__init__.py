"""Comparing recipes over seeds: `plan` says which runs, `runner` runs them, `curves` reads them, `comparison` judges."""
