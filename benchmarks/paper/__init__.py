"""The comparisons of clusters in Splitwise's paper, simulated again: with its policies, and with those that ship."""
