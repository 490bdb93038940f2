"""Refresh: recorded prompts -> new answers, by the policy's current weights.

This stage asks the engines, and not the samples stage, so that no sample waits while engines are away. The stage is
needed for rehearsals, for `late = "refresh"`, and for several answers per hint. It makes the samples of rehearsals; the
samples stage makes those of all other new answers.
"""
