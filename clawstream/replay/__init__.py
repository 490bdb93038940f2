"""The log read again: other judges, or the same votes, on what was recorded; the live topics are only ever read.

A replay reads frozen ranges of the live topics without a group, hosts the stages' own folds in this process, and writes
to topics of its own. What it says is on the control topic: begun, ended, promoted.
"""
