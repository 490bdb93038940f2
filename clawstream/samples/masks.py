"""Which tokens of an answer are trained on, and which answers are not trained on at all. Pure.

The one rule: a token without the log-prob of the policy that sampled it is not trained on; a missing value is never
taken for a number.
"""

import math
from collections.abc import Sequence

from clawstream.events import ExchangeCompleted, FinishReason, Mask, RefusalReason
from clawstream.events.conversation import parse, text_of, tool_calls_of

LONGEST_CYCLE_TOKENS = 64
LOOP_TIMES = 4
LOOP_TOKENS = 64
LOOP_SHARE = 0.5  # of the answer: a table's rule is none


def mask(answer: ExchangeCompleted) -> Mask | RefusalReason:
    """Return 1 for each output token that is trained on and 0 for the others, or why none is."""
    message = parse(answer.message)
    if not answer.output_ids or not (text_of(message).strip() or tool_calls_of(message)):
        return RefusalReason.EMPTY_ANSWER
    if answer.finish_reason is FinishReason.LENGTH:
        return RefusalReason.TRUNCATED
    if loops(answer.output_ids):
        return RefusalReason.LOOPING
    trained = tuple([int(value is not None and math.isfinite(value)) for value in answer.output_logprobs])
    if len(trained) != len(answer.output_ids) or not any(trained):
        return RefusalReason.MISALIGNED
    return trained


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
