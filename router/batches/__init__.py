"""Files and batches: what was uploaded, what came of it, and the queue that one router of a cluster works off."""
