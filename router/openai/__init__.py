"""OpenAI's API in words: which fields a request may have, what an answer looks like, how text becomes tokens."""
