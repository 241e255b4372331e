"""`tandem batch`: answers a file of requests, by a server's own batches or one by one, in its order."""
