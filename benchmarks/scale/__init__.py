"""How large a cluster the simulator holds, and what in the policies that ship grows with it."""
