"""Stage 6: a published version of the policy is taken over by every engine, in place, while it serves.

The gateway stamps what it hears of here on its exchanges, through the policy topic: no request waits for weights.
"""
