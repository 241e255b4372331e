"""What happens in a running cluster, for a person at a terminal: `tandem top` and `tandem trace`."""
