"""Ways to write pages into the memory of another process: UCX, NCCL, and a loopback for tests."""
