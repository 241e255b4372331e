"""Tools: how a model writes its calls, and the reading of them from its text. Pure."""
