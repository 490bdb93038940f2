"""The log read again, with another judge or with the recorded votes; the live topics are only ever read.

A replay reads frozen ranges of the live topics without a group, hosts the stages' own folds in this process, and writes
to topics of its own. The control topic says when it began and ended, and whether it is promoted.
"""
