"""Tandem serves large language models with the two phases of inference on separate workers."""
