"""A replay judges the past again, with another judge or by the recorded votes. It never writes to the live topics.

A replay reads fixed ranges of the live topics, without a group. It hosts the folds of the stages in its own processes,
and writes to topics of its own. The control topic says when it began and ended, and whether it is promoted.
"""
