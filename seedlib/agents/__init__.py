"""Algorithms: each a value made of pure functions (see `seedlib.agents.agent`)."""
