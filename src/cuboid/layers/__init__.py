"""The layers: one equation a file."""
