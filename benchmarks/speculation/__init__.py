"""How many tokens a second guesses bring, from lookup and from a draft."""
