"""Who may ask, how much, and whose a session is."""
