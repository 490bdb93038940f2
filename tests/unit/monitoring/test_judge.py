"""How the judge fares is known from the log wherever the judging runs."""

from dataclasses import replace

from clawstream.events import CUT, VoteCast, VoteStatus
from clawstream.monitoring.alarm import JudgeReachability, ReadVotes, by_votes, readings
from clawstream.stream.stage import Record
from clawstream.stream.topics import VOTES
from tests.unit.monitoring.said import vote


def record(at_ms: int, status: VoteStatus, error: str | None = None, judge: str = "judge") -> Record:
    said: VoteCast = replace(vote(0, status), error=error, judge=judge)
    return Record(topic=VOTES, partition=0, offset=at_ms, timestamp_ms=at_ms, key="s", event=said)


def test_the_newest_votes_say_since_when_and_why_a_judge_gives_none() -> None:
    votes = [
        record(5, VoteStatus.FAILED, "status 404, no such model"),
        record(1, VoteStatus.FAILED, "away"),
        record(2, VoteStatus.UNREADABLE),
        record(4, VoteStatus.FAILED, "away"),
        record(9, VoteStatus.READABLE, judge="another"),
    ]
    assert by_votes(votes, "judge") == JudgeReachability(
        judge="judge", error="status 404, no such model", since_ms=4, heard_ms=5
    )
    assert by_votes([*votes, record(6, VoteStatus.READABLE)], "judge") == JudgeReachability(
        judge="judge", error=None, since_ms=6, heard_ms=6
    )
    assert by_votes(votes, "nobody") is None


def test_replies_that_are_no_votes_are_counted_by_what_is_wrong_with_them() -> None:
    votes = [
        record(1, VoteStatus.READABLE),
        record(2, VoteStatus.UNREADABLE, f"{CUT} 1024"),
        record(3, VoteStatus.UNREADABLE),
        record(4, VoteStatus.UNREADABLE, f"{CUT} 2048"),
        record(7, VoteStatus.UNREADABLE, "it has more than 9 bytes"),
        record(5, VoteStatus.FAILED, "away"),
        record(6, VoteStatus.UNREADABLE, f"{CUT} 1024", judge="another"),
    ]
    assert readings(votes, "judge") == ReadVotes(replies=5, cut=2, cut_tokens=2048, without=1, broken=1)
    assert readings(votes, "nobody") is None
