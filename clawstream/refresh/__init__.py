"""Refresh: recorded prompts -> answers of the policy of today.

A stage apart from samples asks the engines, so that no sample waits while they are away. It need not run where neither
`late = "refresh"` nor several answers a hint are wanted. The samples stage reads its answers from the log and makes
samples of them.
"""
