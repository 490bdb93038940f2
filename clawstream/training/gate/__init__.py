"""Whether a step's outcome may be published, and what is measured for that."""
