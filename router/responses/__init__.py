"""OpenAI's Responses API, without a store: its bodies as chats, and what is generated as items and events."""
