"""How well several routers place requests that know nothing of each other: scripted workers, in virtual time."""
