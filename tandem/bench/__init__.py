"""`tandem bench`: puts a load on a server that speaks the OpenAI API, and measures."""
