"""Which tokens of an answer are trained on, and which answers are not trained on at all. Pure.

The one rule: a token without the log-prob of the policy that sampled it is not trained on; no number stands in for a
missing one.
"""

import math

from clawstream.conversation.loops import loops
from clawstream.conversation.messages import parse, text_of, tool_calls_of
from clawstream.events import ExchangeCompleted, FinishReason, Mask, RefusalReason


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
