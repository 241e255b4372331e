"""Conversations on real workers, with a router that finds prefixes and with one that does not."""
