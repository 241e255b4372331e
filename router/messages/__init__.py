"""Anthropic's Messages API: its bodies as chats, and what is generated as blocks of content and events."""
