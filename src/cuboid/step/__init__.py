"""A training step: its operations, its weights, and the schedule that interleaves them."""
