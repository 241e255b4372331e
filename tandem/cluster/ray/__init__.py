"""Ray behind the supervisor: actors, their placement, and watchers that prove the end of processes."""
