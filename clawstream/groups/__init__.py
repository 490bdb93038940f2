"""Groups: the steps of several attempts at one task -> the advantage of each step.

This stage comes after samples. It reads them from the log, and need not run where no trainer asks for groups. A fold
per session finds attempts that have ended; a fold per group settles the group. The group's fold reads the session
folds' events from the log, so that a replay has the same input.
"""
