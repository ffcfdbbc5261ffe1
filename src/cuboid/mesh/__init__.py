"""The block of devices: its shape, its axes, and which slice of a tensor a rank holds."""
