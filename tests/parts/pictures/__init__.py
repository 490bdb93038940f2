"""Pictures: from a client's request into a prompt and to an engine."""
