"""The single-machine default: a broker, a database and an engine of our own, where none is configured.

Each is the real thing in a process of its own, and none outlives the process that started it.
"""
