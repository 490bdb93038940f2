"""Which samples make up a batch."""
