"""Contestants and measurements for the benchmarks."""
