"""A trainer on two machines that reach each other by a network alone: this one, and a network namespace."""
