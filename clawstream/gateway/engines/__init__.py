"""The engines behind the gateway, and which of them answers."""
