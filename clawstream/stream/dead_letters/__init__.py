"""Records that a stage could not use, and what people ruled about them."""
