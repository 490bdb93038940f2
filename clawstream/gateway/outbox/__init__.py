"""Brings records onto the log, by way of the disk while the log is away."""
