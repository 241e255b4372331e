"""`tandem serve`: from a configuration to a cluster that answers, and back to nothing."""
