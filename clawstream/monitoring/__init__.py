"""Watches the stages: counts events of the log in one-minute windows, and says how an installation fares.

Nothing here can be lost, as all of it is read from the log again. No other part depends on it.
"""
