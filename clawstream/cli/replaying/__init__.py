"""`clawstream replay` and its workers."""
