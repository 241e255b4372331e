"""Laws that size pools by their load, and pools of fixed size, on the same simulated load."""
