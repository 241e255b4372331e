"""Deploys and runs a cluster on Ray: one command to start it, a supervisor that keeps it, commands that look at it."""
