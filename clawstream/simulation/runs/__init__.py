"""One run of an installation with simulated people, and what it measured."""
