"""Groups: the steps of several attempts at one task -> what each was worth among them.

A stage of its own, after samples: it is keyed by the group and not by the session, it rests on samples as they stand on
the log, and where no trainer asks for groups it need not run. One fold per session finds attempts that have ended, one
per group settles; the second reads what the first wrote, so that a replay of it has the same input.
"""
