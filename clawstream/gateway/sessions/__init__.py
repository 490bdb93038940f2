"""Which conversation a request continues, and the prompt that is made of it."""
