"""Whether a step's outcome may be published, and the measurements for that."""
