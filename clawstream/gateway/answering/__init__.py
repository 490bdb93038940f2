"""From an admitted request to an answer that is shown and recorded."""
