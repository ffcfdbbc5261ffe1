"""Training: configuration, loop, run folder."""
