"""A request as plain data: what was asked, what can happen to it, and the journal of what its client has."""
