"""Baselines: one device, 1-D, 2-D and 2.5-D parallelism."""
