"""Collectives over an axis: what each means, its transpose and its books; what is in flight; how backends send it."""
