-- Frozen with revision 0009. `rejected` is why the step was not published; without it and step_id it is to be taken.
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
    r.reason AS rejected
FROM batches AS b
CROSS JOIN LATERAL unnest(b.sample_ids) WITH ORDINALITY AS planned (sample_id, position)
LEFT JOIN steps AS st ON st.policy_id = b.policy_id AND st.policy_version = b.policy_version
LEFT JOIN rejections AS r
    ON r.policy_id = b.policy_id AND r.policy_version = b.policy_version AND r.kind = 'step'
LEFT JOIN samples AS s ON s.sample_id = planned.sample_id
LEFT JOIN verdicts AS v
    ON v.turn_id = s.turn_id AND v.judge = s.judge AND v.revision = s.revision AND v.prompt_version = s.prompt_version
LEFT JOIN votes AS o
    ON o.turn_id = s.turn_id AND o.judge = s.judge AND o.revision = s.revision AND o.prompt_version = s.prompt_version
LEFT JOIN exchanges AS e ON e.exchange_id = s.turn_id AND e.kind = 'completed'
LEFT JOIN turns AS t ON t.turn_id = s.turn_id;
