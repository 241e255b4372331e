"""What a network between two hosts carries: a TCP stream, raw writes, and whole handoffs without a model."""
