"""How a judge model is asked."""
