"""Clusters of simulated engines: what routers and workers cost beside their model, and how many this machine holds."""
