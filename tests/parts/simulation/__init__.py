"""Tests of the simulated people, their judge and the policy they talk to."""
