"""Refresh: recorded prompts -> new answers, by the policy's current weights.

It is this stage that asks the engines, and not the samples stage, so that no sample waits while engines are away. It is
needed for rehearsals, for `late = "refresh"`, and for several answers per hint. The samples stage makes samples of the
new answers; those of rehearsals are made here.
"""
