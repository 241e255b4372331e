"""The life of a request in flight: its attempts, what its client gets, and its end."""
