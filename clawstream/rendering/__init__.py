"""Prompts and chat templates: messages to tokens, and sampled tokens to messages."""
