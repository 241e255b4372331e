"""From a list of hosts to a cluster on them: the file for Ray's launcher, what it needs, its start and its end."""
