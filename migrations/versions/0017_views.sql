-- The views that tell of turns, answers among them that their clients left: those have what was sent by then.

-- A session's answers in order, and what came of each.
CREATE OR REPLACE VIEW trajectories AS
SELECT
    e.session_id,
    e.position,
    e.exchange_id AS turn_id,
    to_timestamp(e.received_at_ms / 1000.0) AS asked_at,
    last_user_text(request_messages(e.exchange_id)) AS request,
    message_text(e.message) AS answer,
    next_state_text(t.next_exchange_id, t.next_state) AS next_state,
    t.kind AS pairing,
    t.reason AS orphaned_because,
    v.status AS verdict,
    v.score,
    h.hint,
    s.sample_id,
    s.reward,
    sampled_by(e.versions) AS policy_versions,
    e.finish_reason,
    s.total_reward,
    s.person_reward,
    s.environment_reward,
    s.heuristic_reward,
    s.num_feedback,
    e.kind = 'failed' AS interrupted
FROM (
    SELECT *, row_number() OVER (PARTITION BY session_id ORDER BY source_partition, source_offset) AS position
    FROM exchanges
    WHERE message IS NOT NULL AND turn_type = 'main'
) AS e
LEFT JOIN turns AS t ON t.turn_id = e.exchange_id
LEFT JOIN LATERAL (
    SELECT status, score FROM verdicts WHERE turn_id = e.exchange_id ORDER BY revision DESC, source_offset DESC LIMIT 1
) AS v ON true
LEFT JOIN LATERAL (
    SELECT hint FROM hints WHERE turn_id = e.exchange_id ORDER BY revision DESC, source_offset DESC LIMIT 1
) AS h ON true
LEFT JOIN LATERAL (
    SELECT * FROM samples WHERE turn_id = e.exchange_id AND refreshed_id IS NULL
    ORDER BY judge = 'nobody', revision DESC, num_feedback DESC NULLS LAST, source_offset DESC LIMIT 1
) AS s ON true;

-- Each verdict with its votes, hint, sample and feedback.
CREATE OR REPLACE VIEW turn_scores AS
SELECT
    v.session_id,
    v.turn_id,
    v.judge,
    v.prompt_version,
    v.revision,
    v.status,
    v.score,
    (v.num_positive - v.num_negative)::double precision
        / nullif(v.num_positive + v.num_neutral + v.num_negative, 0) AS mean_vote,
    v.num_positive + v.num_neutral + v.num_negative AS num_readable,
    v.num_unreadable,
    v.num_failed,
    h.hint,
    s.sample_id,
    s.reward,
    (SELECT avg(f.score) FROM feedback AS f WHERE f.turn_id = v.turn_id) AS feedback_score,
    (SELECT sampled_by(e.versions) FROM exchanges AS e WHERE e.exchange_id = v.turn_id AND e.message IS NOT NULL LIMIT 1)
        AS policy_versions,
    v.log_time,
    s.total_reward,
    s.person_reward,
    s.environment_reward,
    s.heuristic_reward,
    s.num_feedback
FROM verdicts AS v
LEFT JOIN LATERAL (
    SELECT hint FROM hints
    WHERE turn_id = v.turn_id AND judge = v.judge AND prompt_version = v.prompt_version AND revision = v.revision
    ORDER BY source_offset DESC LIMIT 1
) AS h ON true
LEFT JOIN LATERAL (
    SELECT * FROM samples
    WHERE refreshed_id IS NULL AND turn_id = v.turn_id AND judge = v.judge AND prompt_version = v.prompt_version AND revision = v.revision
    ORDER BY num_feedback DESC NULLS LAST, source_offset DESC LIMIT 1
) AS s ON true;

-- From a policy version back to what it learned from: one row per vote on each turn of its batch.
CREATE OR REPLACE VIEW lineage AS
SELECT
    b.policy_id,
    b.policy_version,
    b.parent_version,
    st.event_id AS step_id,
    to_timestamp(st.taken_at_ms / 1000.0) AS taken_at,
    planned.position,
    planned.sample_id,
    s.reward,
    s.hint,
    s.session_id,
    s.turn_id,
    v.event_id AS verdict_id,
    v.status AS verdict_status,
    v.score AS verdict_score,
    o.event_id AS vote_id,
    o.question,
    o.judge,
    o.ballot,
    o.status AS vote_status,
    o.score AS vote_score,
    o.text AS vote_text,
    e.exchange_id,
    e.log_time AS exchanged_at,
    sampled_by(e.versions) AS sampled_by_versions,
    request_messages(e.exchange_id) AS request,
    message_text(e.message) AS answer,
    next_state_text(t.next_exchange_id, t.next_state) AS next_state,
    r.reason AS rejected,
    s.total_reward,
    s.person_reward,
    s.environment_reward,
    s.heuristic_reward,
    s.num_feedback,
    s.refreshed_id,
    message_text(a.message) AS refreshed_answer
FROM batches AS b
CROSS JOIN LATERAL unnest(b.sample_ids) WITH ORDINALITY AS planned (sample_id, position)
LEFT JOIN steps AS st ON st.policy_id = b.policy_id AND st.policy_version = b.policy_version
LEFT JOIN rejections AS r
    ON r.policy_id = b.policy_id AND r.policy_version = b.policy_version AND r.kind = 'step'
LEFT JOIN samples AS s ON s.sample_id = planned.sample_id
LEFT JOIN refreshed_answers AS a ON a.event_id = s.refreshed_id::uuid
LEFT JOIN verdicts AS v
    ON v.turn_id = s.turn_id AND v.judge = s.judge AND v.revision = s.revision AND v.prompt_version = s.prompt_version
LEFT JOIN votes AS o
    ON o.turn_id = s.turn_id AND o.judge = s.judge AND o.revision = s.revision AND o.prompt_version = s.prompt_version
LEFT JOIN exchanges AS e ON e.exchange_id = s.turn_id AND e.message IS NOT NULL
LEFT JOIN turns AS t ON t.turn_id = s.turn_id;
