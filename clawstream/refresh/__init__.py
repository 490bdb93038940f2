"""Refresh: prompts of the past -> answers of the policy of now.

A stage of its own, beside samples: it alone asks the engines, so that no sample waits while they are away; and where
neither `late = "refresh"` nor several answers a hint are wanted it need not run. What the answers are worth is said
where samples are made, from the log.
"""
