"""clawstream: an agent's conversations as an event log, and a policy that learns from what people say next."""

__version__ = "0.1.0"
