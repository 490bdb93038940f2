"""What several stages know about a conversation, beyond the events themselves. Pure."""
