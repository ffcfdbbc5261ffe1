"""Models: configuration, presets, the Transformer, Hugging Face folders."""
