"""What is sent, when, and what comes back: workloads, traces, an HTTP client and its records."""
