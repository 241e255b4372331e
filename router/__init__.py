"""The router: HTTP for clients, admission, placement and the life of each request; it holds no model."""
