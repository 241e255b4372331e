"""The workers as the router knows them: a session with each, its load, and who pairs with whom; and other routers."""
