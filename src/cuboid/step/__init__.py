"""A training step: weights on their way, and what runs beside what."""
