"""`clawstream openclaw` and the configuration that it edits."""
