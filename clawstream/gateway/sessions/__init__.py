"""Which conversation a request continues, and its prompt."""
