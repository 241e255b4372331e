"""How workers on one CPU host share its cores, and wait for each other where all gain by it."""
