"""A grid of loads, from short to long prompts, short to long outputs and one client to many, on several servers."""
