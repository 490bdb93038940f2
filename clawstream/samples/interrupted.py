"""The part of an interrupted answer that its client was sent. Pure.

The one rule: tokens that the client was not sent are no part of the answer, so they are neither judged nor trained on.
"""

from dataclasses import replace

from clawstream.events import ExchangeCompleted, ExchangeFailed, FinishReason


def as_far_as_sent(failed: ExchangeFailed) -> ExchangeCompleted | None:
    """Return the answer as if it had ended where the client left; None: nothing was sent, or the record lacks tokens.

    It has no stop token, as it did not end by itself, and no versions where they are not known.
    """
    if not failed.is_interrupted or failed.message is None:
        return None
    if failed.sampling is None or failed.output_logprobs is None or failed.num_sent_tokens is None:
        return None
    num_sent = failed.num_sent_tokens
    return ExchangeCompleted(
        session_id=failed.session_id,
        exchange_id=failed.exchange_id,
        turn_type=failed.turn_type,
        client=failed.client,
        key_name=failed.key_name,
        model=failed.model,
        request=failed.request,
        request_sha256=failed.exchange_id,
        retry_count=None,
        sampling=failed.sampling,
        policy_id=failed.policy_id,
        versions=tuple(replace(span, num_tokens=num_sent) for span in failed.versions or ()),  # one, if any
        message=failed.message,
        output_ids=failed.output_ids[:num_sent],
        output_logprobs=failed.output_logprobs[:num_sent],
        finish_reason=FinishReason.STOP,
        cached_tokens=None,
        num_spliced=None,
        trace_id=None,
        received_at_ms=failed.received_at_ms,
        first_token_at_ms=None,
        finished_at_ms=failed.finished_at_ms,
    )
