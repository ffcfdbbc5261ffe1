"""Collectives: what each means, its transpose, and what is in flight."""
