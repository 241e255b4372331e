"""One setting at a time, on simulated clusters: what it does to latencies, throughput and memory, and why."""
