"""Splitwise's simulator, written anew on our kernel, beside runs of the original: time model, machines, policies."""
