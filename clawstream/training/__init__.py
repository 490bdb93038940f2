"""Samples become steps, and steps become published versions of the policy."""
