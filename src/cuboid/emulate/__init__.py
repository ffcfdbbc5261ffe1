"""Emulated devices and clusters in slow motion."""
