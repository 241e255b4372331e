"""The HTTP face: connections, bodies, keys, and one exchange for each HTTP request."""
