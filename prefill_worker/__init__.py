"""The prefill role: computes prompts, and pushes their pages into the memory of decode workers."""
