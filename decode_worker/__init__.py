"""The decode role: makes room for prompts, takes their pages in, and generates tokens."""
