"""Which processes there shall be, and what is done when one comes, goes or falls silent; decisions are pure."""
