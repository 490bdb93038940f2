"""`clawstream demo` and `clawstream learn`."""
