"""The handoff of KV pages: its protocol without I/O, the thread that drives it, and the transports."""
