"""What somebody else would publish: an environment, a credit scheme, a renderer and an engine, each in one file."""
