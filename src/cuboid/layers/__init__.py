"""Layers: one equation per file."""
