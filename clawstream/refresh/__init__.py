"""Refresh: recorded prompts -> new answers, by the policy's current weights.

This stage asks the engines, not the samples stage, so that no sample waits while engines are away. It need not run
unless `late = "refresh"` or several answers per hint are set. The samples stage makes samples of the new answers.
"""
