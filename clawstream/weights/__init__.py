"""Stage 5: every engine takes over each published version of the policy, in place, while it serves.

The gateway reads from the policy topic which version each engine took over, and stamps it on its exchanges: no request
waits for weights.
"""
