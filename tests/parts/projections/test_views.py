"""The views join what the topics say, and whole requests are those of clawstream/conversation/history.py."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from clawstream.conversation.history import Parent, WholeRequest, shorten
from clawstream.events import (
    FOR_A_LATE_SAMPLE,
    NOBODY,
    AnswerRefreshed,
    BatchPlanned,
    ExchangeCompleted,
    ExchangeFailed,
    GroupSettled,
    PlannedTurn,
    PolicyActivated,
    PolicyPublished,
    PolicyRejected,
    RefreshAsked,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    StepAdvantage,
    StepDropped,
    StepDropReason,
    StepRejected,
    TrajectoryLate,
    TurnPaired,
    TurnType,
    VersionSpan,
)
from clawstream.projections.text import storable_json
from tests.examples import examples
from tests.parts.projections import one_session
from tests.parts.projections.one_memory import step
from tests.parts.projections.reading import empty, write_all
from tests.sessions import history
from tests.unit.projections import logs


@pytest.fixture
def told(emptied: Engine) -> Engine:
    """A database with one short story in it."""
    write_all(emptied, logs.records(one_session.ONE_SESSION))
    return emptied


def _rows(engine: Engine, query: str) -> list[Mapping[str, Any]]:
    with engine.connect() as connection:
        return [dict(found) for found in connection.execute(text(query)).mappings()]


_requests = st.builds(
    WholeRequest,
    messages=st.lists(logs.JSON_TEXTS, max_size=6).map(tuple),
    token_ids=st.lists(st.integers(0, 5), max_size=8).map(tuple),
    options=st.sampled_from([b"{}", b'{"a": 1}']),
)


@st.composite
def _chains(draw: st.DrawFn) -> list[ExchangeCompleted]:
    """Exchanges of which each continues an earlier one, or none."""
    made: list[ExchangeCompleted] = []
    known: dict[str, WholeRequest] = {}
    for n in range(draw(st.integers(1, 6))):
        parent_id = draw(st.sampled_from([None, *known]))
        request = draw(_requests)
        if parent_id is not None and draw(st.booleans()):
            before = known[parent_id]
            request = WholeRequest(
                messages=(*before.messages, *request.messages),
                token_ids=(*before.token_ids, *request.token_ids),
                options=request.options,
            )
        parent = None if parent_id is None else Parent(exchange_id=parent_id, request=known[parent_id])
        made.append(logs.example(ExchangeCompleted, exchange_id=f"x{n}", request=shorten(request, parent)))
        known = history(made)
    return made


@examples(0.12)
@given(_chains())
def test_a_whole_request_in_sql_is_the_one_that_history_rebuilds(
    migrated: Engine, exchanges: list[ExchangeCompleted]
) -> None:
    empty(migrated)
    write_all(migrated, logs.records(exchanges))
    found = {
        row["exchange_id"]: (row["messages"], row["token_ids"], row["options"])
        for row in _rows(
            migrated,
            """SELECT exchange_id, request_messages(exchange_id) AS messages,
                request_token_ids(exchange_id) AS token_ids, request_options(exchange_id) AS options FROM exchanges""",
        )
    }
    assert found == {
        exchange_id: (_stored(migrated, request.messages), list(request.token_ids), json.loads(request.options))
        for exchange_id, request in history(exchanges).items()
    }


def _stored(engine: Engine, messages: tuple[bytes, ...]) -> Any:
    """The messages as jsonb gives them back."""
    with engine.connect() as connection:
        together = f"[{','.join(map(storable_json, messages))}]"
        return connection.execute(text("SELECT CAST(:together AS jsonb)"), {"together": together}).scalar()


@pytest.mark.parametrize("exchange_id", [one_session.SECOND, "unheard of"])
def test_a_request_whose_parent_is_missing_is_null_and_not_a_shorter_one(emptied: Engine, exchange_id: str) -> None:
    write_all(emptied, logs.records(one_session.EXCHANGES[1:]))
    with emptied.connect() as connection:
        found = connection.execute(
            text("SELECT request_messages(:id), request_token_ids(:id)"), {"id": exchange_id}
        ).one()
    assert found == (None, None)


def test_trajectories_tell_each_main_answer_in_order_with_what_came_of_it(told: Engine) -> None:
    first, second = _rows(
        told, f"SELECT * FROM trajectories WHERE session_id = '{one_session.SESSION}' ORDER BY position"
    )
    assert (first["position"], first["turn_id"]) == (1, one_session.FIRST)
    assert (first["request"], first["answer"]) == ("What is 2 + 3?", "**5**")
    assert first["next_state"] == "user: No bold, please."
    assert (first["pairing"], first["verdict"], first["score"]) == ("paired", "decided", -1)
    assert (first["hint"], first["sample_id"], first["reward"]) == (
        "Answer without bold.",
        one_session.SAMPLE.sample_id,
        -1,
    )
    assert (second["position"], second["request"], second["policy_versions"]) == (2, "No bold, please.", [0, 1])
    assert (second["next_state"], second["score"], second["sample_id"]) == (None, None, None)


def test_turn_scores_put_verdict_votes_hint_sample_and_feedback_side_by_side(told: Engine) -> None:
    [row] = _rows(told, "SELECT * FROM turn_scores")
    assert row["mean_vote"] == pytest.approx(-1 / 3)
    assert (row["score"], row["num_readable"], row["num_unreadable"]) == (-1, 3, 1)
    assert (row["sample_id"], row["feedback_score"], row["policy_versions"]) == (
        one_session.SAMPLE.sample_id,
        -1.0,
        [0],
    )


def test_each_revision_of_a_sample_says_whether_it_was_planned_or_came_too_late(emptied: Engine) -> None:
    def revised(num_feedback: int | None, turn_id: str = one_session.FIRST, **changes: Any) -> SampleAssembled:
        return replace(one_session.SAMPLE, turn_id=turn_id, num_feedback=num_feedback, **changes)

    first, planned, late = revised(None), revised(1, person_reward=1.0, total_reward=0.0), revised(2)
    waits, gone, alone = revised(3, "t2"), revised(2, "t2"), revised(1, "t3", judge=NOBODY, prompt_version=NOBODY)
    after = revised(1, "t3")
    plan = BatchPlanned(
        policy_id="policy", policy_version=1, parent_version=0, sample_ids=(planned.sample_id, alone.sample_id),
        offsets=(), seed=0, settings=b"{}", planned_at_ms=0,
        turns=(PlannedTurn(turn_id=one_session.FIRST, judge="judge", prompt_version="v1", revision=0),),
    )  # fmt: skip
    write_all(emptied, logs.records([first, planned, late, gone, waits, alone, after, plan]))
    rows = {row["sample_id"]: row for row in _rows(emptied, "SELECT * FROM sample_revisions")}
    assert {name: row["standing"] for name, row in rows.items()} == {
        first.sample_id: "superseded",
        planned.sample_id: "planned",
        late.sample_id: "late",
        gone.sample_id: "superseded",
        waits.sample_id: "unplanned",
        alone.sample_id: "planned",
        after.sample_id: "late",
    }
    row = rows[planned.sample_id]
    assert (row["planned_version"], row["reward"], row["person_reward"], row["total_reward"]) == (1, -1, 1.0, 0.0)


def test_trajectories_and_scores_tell_the_newest_revision(emptied: Engine) -> None:
    older, revised = (replace(one_session.SAMPLE, num_feedback=heard, total_reward=0.0) for heard in (1, 2))
    write_all(emptied, logs.records([*one_session.ONE_SESSION, revised, older]))
    [told, _] = _rows(
        emptied, f"SELECT * FROM trajectories WHERE session_id = '{one_session.SESSION}' ORDER BY position"
    )
    [scored] = _rows(emptied, "SELECT * FROM turn_scores")
    for row in (told, scored):
        assert (row["sample_id"], row["reward"], row["total_reward"]) == (revised.sample_id, -1, 0.0)


def test_judge_agreement_counts_readable_scores_and_shares_of_the_rest(told: Engine) -> None:
    [row] = _rows(told, "SELECT * FROM judge_agreement")
    assert (row["judge"], row["num_votes"]) == ("judge", 5)
    assert float(row["agreeing_share"]) == pytest.approx(2 / 3)
    assert (float(row["unreadable_share"]), float(row["failed_share"])) == (0.2, 0.0)
    assert (row["num_scored_by_people"], row["as_people_share"]) == (0, None)


def test_judge_agreement_counts_how_often_a_judge_and_a_person_agree_on_an_answer(emptied: Engine) -> None:
    def scored(turn_id: str, reward: int | None, person: float | None, **changes: Any) -> SampleAssembled:
        sample = replace(one_session.SAMPLE, turn_id=turn_id, reward=reward, person_reward=person, cut=False)
        return replace(sample, **changes)

    said = [
        *(scored("t1", 1, 1.0), scored("t2", -1, -0.5), scored("t3", 1, -1.0)),
        scored("t4", 1, 1.0, num_feedback=1),  # who then changed their mind
        scored("t4", 1, -1.0, num_feedback=2),
        *(scored("t5", None, 1.0), scored("t6", 1, None)),
        scored("t7", -1, 1.0, cut=True),  # nobody's verdict
        scored("t8", 1, 1.0, judge="another"),
    ]
    write_all(emptied, logs.records([*one_session.ONE_SESSION, *said]))
    [row] = _rows(emptied, "SELECT * FROM judge_agreement")
    assert (row["judge"], row["num_votes"]) == ("judge", 5)
    assert (row["num_scored_by_people"], float(row["as_people_share"])) == (4, 0.5)


def test_policy_report_has_a_row_for_every_version_the_base_included(told: Engine) -> None:
    base, trained = _rows(told, "SELECT * FROM policy_report ORDER BY policy_version")
    assert (base["num_served"], base["num_scored"], base["mean_score"], base["loss_nats"]) == (2, 1, -1, None)
    assert (trained["parent_version"], trained["loss_nats"], trained["mean_reward"]) == (0, 0.25, -1.0)
    assert (trained["pause_ms"], trained["num_served"], trained["mean_score"]) == (21.0, 1, None)


def test_lineage_walks_from_a_version_to_the_votes_and_the_request_it_learned_from(told: Engine) -> None:
    rows = _rows(told, "SELECT * FROM lineage WHERE policy_version = 1 ORDER BY position, question, ballot")
    *voted, elsewhere = rows
    assert [(row["question"], row["vote_score"]) for row in voted] == [
        ("hint", 1),
        ("score", -1),
        ("score", 1),
        ("score", -1),
        ("score", None),
    ]
    for row in voted:
        assert row["sample_id"] == one_session.SAMPLE.sample_id
        assert None not in (row["step_id"], row["verdict_id"], row["vote_id"])
        assert (row["exchange_id"], row["verdict_score"]) == (one_session.FIRST, -1)
        assert row["request"] == [
            json.loads(message) for message in (one_session.SYSTEM, one_session.QUESTION, one_session.BLOCK)
        ]
        assert (row["answer"], row["next_state"]) == ("**5**", "user: No bold, please.")
    assert (elsewhere["sample_id"], elsewhere["exchange_id"]) == ("elsewhere", None)


def test_lineage_says_why_a_step_was_rejected_and_nothing_of_one_that_was_taken(emptied: Engine) -> None:
    plan, refused = (
        logs.example(kind, policy_id="policy", policy_version=2, **said)
        for kind, said in (
            (BatchPlanned, {"sample_ids": (one_session.SAMPLE.sample_id,)}),
            (PolicyRejected, {"reason": "an engine has no room"}),
        )
    )
    rejected = logs.example(StepRejected, policy_id="policy", policy_version=2, reason="it looped")
    write_all(emptied, logs.records([*one_session.ONE_SESSION, plan, refused, rejected]))

    found = {
        (row["policy_version"], row["step_id"] is not None, row["rejected"])
        for row in _rows(emptied, "SELECT policy_version, step_id, rejected FROM lineage")
    }
    assert found == {(1, True, None), (2, False, "it looped")}


def test_each_step_of_a_group_has_its_advantage_or_why_it_has_none(emptied: Engine) -> None:
    kept = StepAdvantage(turn_id="t1", sample_id="s1", step_index=0, reward=2.0, advantage=1.5)
    dropped, late = (
        StepDropped(turn_id=turn, sample_id=None, step_index=1, reason=reason)
        for turn, reason in (("t2", StepDropReason.NO_SAMPLE), ("t3", StepDropReason.LATE))
    )
    settled = GroupSettled(group_id="g", trajectories=("t",), complete=True, advantages=(kept,), dropped=(dropped,))
    after = TrajectoryLate(group_id="g", trajectory="u", session_id="s", dropped=(late,))
    write_all(emptied, logs.records([settled, after]))
    found = _rows(emptied, "SELECT turn_id, sample_id, step_index, reward, advantage, reason FROM group_steps")
    assert {tuple(row.values()) for row in found} == {
        ("t1", "s1", 0, 2.0, 1.5, None),
        ("t2", None, 1, None, None, "no_sample"),
        ("t3", None, 1, None, None, "late"),
    }


def test_a_sample_of_an_answer_given_again_is_told_apart_and_shows_that_answer(emptied: Engine) -> None:
    given = logs.example(
        AnswerRefreshed, session_id=one_session.SESSION, turn_id=one_session.FIRST, number=1, policy_id="policy",
        versions=(VersionSpan(policy_version=1, num_tokens=2),), output_ids=(5, 6), output_logprobs=(-0.5, -0.25),
        message=one_session.message("assistant", "5, again"), error=None,
    )  # fmt: skip
    refreshed = replace(one_session.SAMPLE, reward=None, total_reward=None, refreshed_id=given.event_id)
    plan = logs.example(
        BatchPlanned, policy_id="policy", policy_version=2, sample_ids=(refreshed.sample_id,), replay=None
    )
    write_all(emptied, logs.records([*one_session.ONE_SESSION, given, refreshed, plan]))

    lineage = _rows(emptied, "SELECT * FROM lineage WHERE question = 'hint' ORDER BY policy_version")
    assert [(row["answer"], row["refreshed_answer"]) for row in lineage] == [("**5**", None), ("**5**", "5, again")]
    assert [row["refreshed_id"] for row in lineage] == [None, given.event_id]
    revisions = _rows(emptied, "SELECT standing, refreshed_id FROM sample_revisions ORDER BY refreshed_id NULLS FIRST")
    assert [tuple(one.values()) for one in revisions] == [("planned", None), ("planned", given.event_id)]
    [told, _] = _rows(
        emptied, f"SELECT * FROM trajectories WHERE session_id = '{one_session.SESSION}' ORDER BY position"
    )
    [scored] = _rows(emptied, "SELECT * FROM turn_scores")
    assert {told["sample_id"], scored["sample_id"]} == {one_session.SAMPLE.sample_id}


def test_a_prompt_that_was_to_be_answered_again_says_what_came_of_it(emptied: Engine) -> None:
    def given(turn: str, number: int, error: str | None = None) -> AnswerRefreshed:
        refreshed: AnswerRefreshed = logs.example(
            AnswerRefreshed, session_id=one_session.SESSION, turn_id=turn, number=number, versions=(), output_ids=(),
            output_logprobs=(), message=None if error else one_session.message("assistant", "5, again"), error=error,
        )  # fmt: skip
        return refreshed

    sampled, cut = given(one_session.FIRST, FOR_A_LATE_SAMPLE), given(one_session.FIRST, 1)
    sample = replace(one_session.SAMPLE, reward=None, total_reward=None, refreshed_id=sampled.event_id)
    refused = logs.example(
        SampleRefused, session_id=one_session.SESSION, turn_id=one_session.FIRST, reason=RefusalReason.TRUNCATED,
        refreshed_id=cut.event_id,
    )  # fmt: skip
    asks = [
        logs.example(RefreshAsked, session_id=one_session.SESSION, turn_id=turn)
        for turn in (one_session.FIRST, "waits")
    ]
    write_all(emptied, logs.records([*asks, sampled, cut, given("broken", 0, "too long"), sample, refused]))
    rows = _rows(emptied, "SELECT * FROM refreshed_outcomes ORDER BY turn_id, number")
    told = {
        (row["turn_id"], row["number"]): (row["answer"], row["sample_id"], row["no_sample_because"]) for row in rows
    }
    assert told == {
        (one_session.FIRST, 0): ("5, again", sample.sample_id, None),
        (one_session.FIRST, 1): ("5, again", None, "truncated"),
        ("broken", 0): (None, None, "too long"),
        ("waits", 0): (None, None, "not answered yet"),
    }


def test_a_session_counts_its_exchanges_once_and_says_how_it_ended(told: Engine) -> None:
    write_all(told, {})
    [row] = _rows(told, "SELECT * FROM sessions")
    assert (row["num_main"], row["num_side"], row["num_failed"]) == (2, 1, 0)
    assert row["client"] == "openclaw"
    assert row["done_at"] == row["last_at"]
    assert row["idle_at"] is None


def test_the_latency_of_a_row_is_the_commit_after_the_answer(told: Engine) -> None:
    rows = _rows(told, "SELECT row_ms FROM exchange_latency")
    assert len(rows) == len(one_session.EXCHANGES)
    assert all(row["row_ms"] > 0 for row in rows)


def test_a_session_shows_an_answer_that_was_stopped_with_what_was_sent_of_it(emptied: Engine) -> None:
    stopped = logs.example(
        ExchangeFailed,
        session_id=one_session.SESSION,
        exchange_id="stopped",
        turn_type=TurnType.MAIN,
        request=one_session.EXCHANGES[0].request,
        message=one_session.message("assistant", "and so on and"),
    )
    unsent = replace(stopped, exchange_id="unsent", message=None)
    paired = TurnPaired(
        session_id=one_session.SESSION,
        turn_id="stopped",
        next_exchange_id=one_session.SECOND,
        next_state=(3,),
        interrupted=True,
    )
    write_all(emptied, logs.records((one_session.EXCHANGES[0], stopped, unsent, one_session.EXCHANGES[1], paired)))
    rows = _rows(
        emptied, "SELECT turn_id, answer, next_state, pairing, interrupted FROM trajectories ORDER BY position"
    )
    assert [tuple(row.values()) for row in rows] == [
        (one_session.FIRST, "**5**", None, None, False),
        ("stopped", "and so on and", "user: No bold, please.", "paired", True),
        (one_session.SECOND, "5", None, None, False),
    ]


def test_the_adapters_of_keys_are_told_apart_from_the_shared_policy(emptied: Engine) -> None:
    def published(policy_id: str, version: int) -> PolicyPublished:
        found: PolicyPublished = logs.example(PolicyPublished, policy_id=policy_id, policy_version=version)
        return found

    taken = [replace(step(number), policy_id="policy+ann", num_samples=10 + number) for number in (4, 5)]
    served = logs.example(PolicyActivated, policy_id="policy+ann", policy_version=4)
    versions = [
        published("policy", 3),
        *(published("policy+ann", n) for n in (3, 4, 5)),
        published("policy+acme+ann", 0),
    ]
    write_all(emptied, logs.records([*versions, *taken, served]))
    other, ann = _rows(emptied, "SELECT * FROM adapters ORDER BY began_with")
    assert (other["key_name"], other["policy_id"]) == ("acme+ann", "policy+acme+ann")
    assert (ann["key_name"], ann["policy_id"], ann["began_with"]) == ("ann", "policy+ann", 3)
    assert (ann["newest_version"], ann["served_version"], ann["num_updates"], ann["num_samples"]) == (5, 4, 2, 29)
    assert (other["began_with"], other["served_version"], other["num_updates"], other["num_samples"]) == (0, None, 0, 0)
