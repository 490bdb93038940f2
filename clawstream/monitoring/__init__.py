"""Beside the stages: live one-minute windows over the log, and what runs where.

Nothing here can be lost, because all of it is read from the log again. Nothing here decides anything.
"""
