"""What numbers of fewer bits do to what a model says."""
