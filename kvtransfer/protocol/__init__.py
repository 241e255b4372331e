"""Both halves of a handoff as state machines: events in, instructions out; no clock and no I/O."""
