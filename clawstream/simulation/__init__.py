"""Simulated people, and a tiny simulated policy for them to talk to, as `clawstream demo` shows them."""
