"""What both kinds of worker share: the batch scheduler, the runner, and the life of a worker process."""
