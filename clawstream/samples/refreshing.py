"""Which refreshed answers a hint scores. Pure.

The one rule: a refreshed answer's sample depends on that answer and the hint alone, never on scores of the turn's own
answer. Of two answers with one number the first on the log counts, so the same log always gives the same samples.
"""

from dataclasses import replace

from clawstream.events import (
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    HintFound,
    TeacherScored,
)
from clawstream.samples.session import CandidateAnswer, JoiningState, VerdictKey, judged_of


def made_whole(session: JoiningState, event: Event) -> list[tuple[VerdictKey, AnswerRefreshed]]:
    """Return the pairs of hint and refreshed answer that `event`, the newest fact, may have completed."""
    match event:
        case AnswerRefreshed() | HintFound() | TeacherScored():
            turn_id = event.turn_id
        case ExchangeCompleted():
            turn_id = event.exchange_id
        case _:
            return []
    given = [one for one in session.refreshed.get(turn_id, {}).values() if one.message is not None]
    if not given or turn_id not in session.answers:
        return []
    if isinstance(event, AnswerRefreshed):
        given = [one for one in given if one.event_id == event.event_id]
    keys = [key for key, found in session.hints.items() if key.turn_id == turn_id and isinstance(found, HintFound)]
    if isinstance(event, HintFound | TeacherScored):
        keys = [key for key in keys if key == judged_of(event)]
    return [(key, one) for key in keys for one in given if (key, one.event_id) not in session.scored_anew]


def answered_anew(answer: CandidateAnswer, given: AnswerRefreshed) -> CandidateAnswer:
    """Return the turn as if this had been its answer."""
    assert given.message is not None, "an answer that is none is scored by no hint"
    assert given.finish_reason is not None, "an answer ended somehow"
    exchange = replace(
        answer.exchange,
        message=given.message,
        output_ids=given.output_ids,
        output_logprobs=given.output_logprobs,
        finish_reason=given.finish_reason,
        sampling=given.sampling,
        policy_id=given.policy_id,
        versions=given.versions,
        group_id=None,
    )
    return answer._replace(exchange=exchange, interrupted=False)
