"""Recognises answers that repeat themselves: samples of them, and policies that give them, are refused. Pure."""

import math
from collections.abc import Sequence

LONGEST_CYCLE_TOKENS = 64
LOOP_TIMES = 4
LOOP_TOKENS = 64
LOOP_SHARE = 0.5  # of the answer; less, such as a table's rule, is no loop


def loops(token_ids: Sequence[int]) -> bool:
    """Return whether at least half of an answer, at its end, is one cycle of tokens, four times or more."""
    least = max(LOOP_TOKENS, math.ceil(len(token_ids) * LOOP_SHARE))
    for cycle in range(1, min(LONGEST_CYCLE_TOKENS, len(token_ids) // LOOP_TIMES) + 1):
        begin = len(token_ids) - cycle
        while begin > 0 and token_ids[begin - 1] == token_ids[begin - 1 + cycle]:
            begin -= 1
        if len(token_ids) - begin >= max(least, LOOP_TIMES * cycle):
            return True
    return False
