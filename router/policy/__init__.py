"""What the router decides: who is let in, which workers serve, what follows a failure. Pure."""
