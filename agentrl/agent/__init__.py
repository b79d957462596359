"""Programs that play in place of an environment: a function, a command or a service, each with a session of its own."""
