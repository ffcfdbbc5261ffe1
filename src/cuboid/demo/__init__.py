"""The demo: one small model on one device and on two cuboids, compared step by step."""
