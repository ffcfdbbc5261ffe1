"""Benchmarks: layouts and measurements."""
