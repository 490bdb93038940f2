"""Groups: the steps of several attempts at one task -> the advantage of each step.

This stage comes after samples: it is keyed by group, reads samples from the log, and need not run where no trainer asks
for groups. One fold per session finds attempts that have ended; one per group settles the group. The second reads the
first one's events from the log, so that a replay has the same input.
"""
