"""What the router remembers of its requests, for people: each one's way, and figures of the last minutes."""
