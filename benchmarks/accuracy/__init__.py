"""What numbers of fewer bits do to what a model says; and a writer of checkpoints as quantisers write them."""
