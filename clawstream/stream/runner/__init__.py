"""Hosts a stage on a log: reads, folds, writes, calls, commits."""
