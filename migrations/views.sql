-- Joins over the tables. A topic may be read ahead of another, so every join is outer and absence is NULL.
--
-- These are the functions and views as they are now; a database gets them when it is made, and again with each change of
-- its tables or revision. Views of others may rest on ours, so a new column stands at a view's end; before any other
-- change a revision drops the view.

-- What a message says: its text; its tool calls where it has none.
CREATE OR REPLACE FUNCTION message_text(message jsonb) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(
        nullif(
            CASE jsonb_typeof(message -> 'content')
                WHEN 'string' THEN message ->> 'content'
                WHEN 'array' THEN (
                    SELECT string_agg(coalesce(part ->> 'text', '[' || (part ->> 'type') || ']'), E'\n' ORDER BY n)
                    FROM jsonb_array_elements(message -> 'content') WITH ORDINALITY AS parts (part, n)
                )
            END,
            ''
        ),
        message ->> 'tool_calls'
    )
$$;

-- What the user said last; a client's own block at the end of a request is not the user's.
CREATE OR REPLACE FUNCTION last_user_text(messages jsonb) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT said
    FROM jsonb_array_elements(messages) WITH ORDINALITY AS asked (message, n), message_text(message) AS said
    WHERE message ->> 'role' = 'user' AND said NOT LIKE '<<<BEGIN\_OPENCLAW\_INTERNAL\_CONTEXT>>>%'
    ORDER BY n DESC
    LIMIT 1
$$;

-- The policy versions that sampled an answer, ascending.
CREATE OR REPLACE FUNCTION sampled_by(versions jsonb) RETURNS bigint[] LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT array_agg(DISTINCT (span ->> 'policy_version')::bigint)
    FROM jsonb_array_elements(versions) AS spans (span)
$$;

-- An exchange and its parents. Of each, items that begin before `until_message` (`until_token`) are part of the request
-- of the first; NULL: all of them are.
CREATE OR REPLACE FUNCTION request_chain(wanted text) RETURNS TABLE (
    depth integer,
    parent_exchange_id text,
    kept_messages bigint,
    kept_tokens bigint,
    messages jsonb,
    token_ids integer[],
    options jsonb,
    until_message bigint,
    until_token bigint
) LANGUAGE sql STABLE PARALLEL SAFE AS $$
    WITH RECURSIVE chain AS (
        (
            SELECT 0 AS depth, e.parent_exchange_id, e.kept_messages, e.kept_tokens, e.messages, e.token_ids, e.options,
                NULL::bigint AS until_message, NULL::bigint AS until_token
            FROM exchanges e
            WHERE e.exchange_id = wanted
            ORDER BY e.kind
            LIMIT 1
        )
        UNION ALL
        SELECT c.depth + 1, p.parent_exchange_id, p.kept_messages, p.kept_tokens, p.messages, p.token_ids, p.options,
            least(c.until_message, c.kept_messages), least(c.until_token, c.kept_tokens)
        FROM chain c
        JOIN exchanges p ON p.exchange_id = c.parent_exchange_id AND p.kind = 'completed'
        WHERE c.depth < 1000
    )
    SELECT * FROM chain
$$;

-- The whole request's messages; NULL while an exchange that they are kept in is missing.
CREATE OR REPLACE FUNCTION request_messages(wanted text) RETURNS jsonb LANGUAGE sql STABLE PARALLEL SAFE AS $$
    WITH chain AS MATERIALIZED (
        SELECT * FROM request_chain(wanted)
    ), kept AS (
        SELECT jsonb_agg(message ORDER BY depth DESC, n) AS messages, count(*) AS num_messages
        FROM chain, jsonb_array_elements(chain.messages) WITH ORDINALITY AS own (message, n)
        WHERE until_message IS NULL OR kept_messages + n <= until_message
    )
    SELECT coalesce(kept.messages, '[]')
    FROM kept, chain AS first, chain AS root
    WHERE first.depth = 0 AND root.parent_exchange_id IS NULL
        AND kept.num_messages = first.kept_messages + jsonb_array_length(first.messages)
$$;

-- The whole prompt; NULL while an exchange that it is kept in is missing.
CREATE OR REPLACE FUNCTION request_token_ids(wanted text) RETURNS integer[] LANGUAGE sql STABLE PARALLEL SAFE AS $$
    WITH chain AS MATERIALIZED (
        SELECT * FROM request_chain(wanted)
    ), kept AS (
        SELECT array_agg(token_id ORDER BY depth DESC, n) AS token_ids, count(*) AS num_tokens
        FROM chain, unnest(chain.token_ids) WITH ORDINALITY AS own (token_id, n)
        WHERE until_token IS NULL OR kept_tokens + n <= until_token
    )
    SELECT coalesce(kept.token_ids, '{}')
    FROM kept, chain AS first, chain AS root
    WHERE first.depth = 0 AND root.parent_exchange_id IS NULL
        AND kept.num_tokens = first.kept_tokens + cardinality(first.token_ids)
$$;

-- The whole request's body without its messages.
CREATE OR REPLACE FUNCTION request_options(wanted text) RETURNS jsonb LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT options FROM request_chain(wanted) WHERE options IS NOT NULL ORDER BY depth LIMIT 1
$$;

-- What was said after an answer, each message after its role.
CREATE OR REPLACE FUNCTION next_state_text(next_exchange_id text, next_state integer[]) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT string_agg((asked.messages -> i ->> 'role') || ': ' || message_text(asked.messages -> i), E'\n' ORDER BY n)
    FROM (SELECT request_messages(next_exchange_id) AS messages OFFSET 0) AS asked,
        unnest(next_state) WITH ORDINALITY AS said (i, n)
$$;

-- Of each turn the verdict of the newest look at it.
CREATE OR REPLACE VIEW newest_verdicts AS
SELECT DISTINCT ON (turn_id) *
FROM verdicts
ORDER BY turn_id, revision DESC, source_offset DESC;

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
    (
        SELECT sampled_by(e.versions) FROM exchanges AS e
        WHERE e.exchange_id = v.turn_id AND e.message IS NOT NULL LIMIT 1
    ) AS policy_versions,
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
    WHERE refreshed_id IS NULL AND turn_id = v.turn_id
        AND judge = v.judge AND prompt_version = v.prompt_version AND revision = v.revision
    ORDER BY num_feedback DESC NULLS LAST, source_offset DESC LIMIT 1
) AS s ON true;

-- How each judge does against the verdicts that its votes helped to make, and against people's scores.
CREATE OR REPLACE VIEW judge_agreement AS
SELECT
    o.judge,
    count(*) AS num_votes,
    avg((o.score = v.score)::integer) FILTER (WHERE o.question = 'score' AND o.status = 'readable')
        AS agreeing_share,
    avg((o.status = 'unreadable')::integer) AS unreadable_share,
    avg((o.status = 'failed')::integer) AS failed_share,
    avg(o.latency_ms) FILTER (WHERE o.status <> 'failed') AS mean_latency_ms,
    sum(o.prompt_tokens) AS prompt_tokens,
    sum(o.completion_tokens) AS completion_tokens,
    coalesce(max(p.num_scored), 0) AS num_scored_by_people,
    max(p.as_people_share) AS as_people_share
FROM votes AS o
LEFT JOIN LATERAL (
    SELECT score FROM verdicts
    WHERE turn_id = o.turn_id AND judge = o.judge AND revision = o.revision AND prompt_version = o.prompt_version
    LIMIT 1
) AS v ON true
LEFT JOIN (
    SELECT judge, count(*) AS num_scored, avg((reward * person_reward > 0)::integer) AS as_people_share
    FROM (
        SELECT DISTINCT ON (turn_id, judge) judge, reward, person_reward
        FROM samples
        WHERE refreshed_id IS NULL AND reward <> 0 AND person_reward <> 0 AND NOT cut
        ORDER BY turn_id, judge, revision DESC, num_feedback DESC NULLS LAST, source_offset DESC
    ) AS scored
    GROUP BY judge
) AS p ON p.judge = o.judge
GROUP BY o.judge;

-- Each policy version: what made it, how engines took it over, and how it did.
CREATE OR REPLACE VIEW policy_report AS
WITH answered AS (
    SELECT
        e.policy_id,
        version AS policy_version,
        count(*) AS num_served,
        count(v.score) AS num_scored,
        avg(v.score) AS mean_score
    FROM exchanges AS e
    CROSS JOIN LATERAL unnest(sampled_by(e.versions)) AS sampling (version)
    LEFT JOIN newest_verdicts AS v ON v.turn_id = e.exchange_id AND e.turn_type = 'main'
    WHERE e.kind = 'completed'
    GROUP BY e.policy_id, version
), taken_over AS (
    SELECT policy_id, policy_version, min(activated_at_ms) AS activated_at_ms, max(pause_ms) AS pause_ms
    FROM activations
    GROUP BY policy_id, policy_version
)
SELECT
    p.policy_id,
    p.policy_version,
    p.parent_version,
    st.num_samples,
    st.mean_reward,
    st.loss_nats,
    st.kl_reference_nats,
    st.mean_gap_nats,
    st.mean_versions_behind,
    st.step_ms,
    to_timestamp(p.published_at_ms / 1000.0) AS published_at,
    to_timestamp(t.activated_at_ms / 1000.0) AS activated_at,
    t.pause_ms,
    coalesce(a.num_served, 0) AS num_served,
    coalesce(a.num_scored, 0) AS num_scored,
    a.mean_score,
    p.path
FROM policies AS p
LEFT JOIN steps AS st ON st.policy_id = p.policy_id AND st.policy_version = p.policy_version
LEFT JOIN taken_over AS t ON t.policy_id = p.policy_id AND t.policy_version = p.policy_version
LEFT JOIN answered AS a ON a.policy_id = p.policy_id AND a.policy_version = p.policy_version;

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

-- How long after an answer its row could be read.
CREATE OR REPLACE VIEW exchange_latency AS
SELECT
    e.session_id,
    e.exchange_id,
    to_timestamp(e.finished_at_ms / 1000.0) AS finished_at,
    extract(epoch FROM c.committed_at) * 1000 - e.finished_at_ms AS row_ms
FROM exchanges AS e
CROSS JOIN LATERAL (
    SELECT committed_at
    FROM commits
    WHERE topic = e.source_topic AND partition = e.source_partition AND next_offset > e.source_offset
    ORDER BY next_offset
    LIMIT 1
) AS c;

-- Each sample, and what became of it: of an answer's revisions one is planned at most, and what comes after it is late.
CREATE OR REPLACE VIEW sample_revisions AS
WITH ranked AS (
    SELECT *, ROW(judge <> 'nobody', revision, coalesce(num_feedback, 0)) AS place
    FROM samples
), planned AS (
    SELECT b.policy_id, b.policy_version, named.sample_id
    FROM batches AS b
    CROSS JOIN LATERAL unnest(b.sample_ids) AS named (sample_id)
    WHERE b.replay IS NULL
), revisions AS (
    SELECT s.*, p.policy_version AS planned_version
    FROM ranked AS s
    LEFT JOIN planned AS p ON p.sample_id = s.sample_id AND p.policy_id = s.policy_id
)
SELECT
    s.session_id,
    s.turn_id,
    s.judge,
    s.prompt_version,
    s.revision,
    s.num_feedback,
    s.sample_id,
    s.reward,
    s.person_reward,
    s.environment_reward,
    s.heuristic_reward,
    s.total_reward,
    s.policy_id,
    s.planned_version,
    CASE
        WHEN s.planned_version IS NOT NULL THEN 'planned'
        WHEN bool_or(r.planned_version IS NOT NULL AND r.place < s.place) THEN 'late'
        WHEN bool_or(r.place > s.place) THEN 'superseded'
        ELSE 'unplanned'
    END AS standing,
    s.log_time AS assembled_at,
    s.refreshed_id
FROM revisions AS s
LEFT JOIN revisions AS r
    ON r.turn_id = s.turn_id AND r.refreshed_id IS NOT DISTINCT FROM s.refreshed_id AND r.sample_id <> s.sample_id
    AND (r.judge = 'nobody' OR s.judge = 'nobody' OR (r.judge = s.judge AND r.prompt_version = s.prompt_version))
GROUP BY s.session_id, s.turn_id, s.judge, s.prompt_version, s.revision, s.num_feedback, s.sample_id, s.reward,
    s.person_reward, s.environment_reward, s.heuristic_reward, s.total_reward, s.policy_id, s.planned_version, s.place,
    s.log_time, s.refreshed_id;

-- Each step of a group that was settled, or came after that; `reason` is why it is not trained on.
CREATE OR REPLACE VIEW group_steps AS
SELECT g.group_id, s.step_index, s.turn_id, s.sample_id, s.reward, s.advantage, NULL::text AS reason, g.log_time
FROM groups AS g
CROSS JOIN LATERAL jsonb_to_recordset(g.advantages)
    AS s(step_index bigint, turn_id text, sample_id text, reward double precision, advantage double precision)
UNION ALL
SELECT g.group_id, s.step_index, s.turn_id, s.sample_id, NULL, NULL, s.reason, g.log_time
FROM groups AS g
CROSS JOIN LATERAL jsonb_to_recordset(g.dropped)
    AS s(step_index bigint, turn_id text, sample_id text, reason text);

-- What came of each prompt that was to be answered again.
CREATE OR REPLACE VIEW refreshed_outcomes AS
SELECT
    session_id,
    turn_id,
    number,
    a.event_id::text AS refreshed_id,
    to_timestamp(a.answered_at_ms / 1000.0) AS answered_at,
    message_text(a.message) AS answer,
    came.judge,
    came.prompt_version,
    came.revision,
    came.sample_id,
    CASE
        WHEN a.event_id IS NULL THEN 'not answered yet'
        WHEN came.sample_id IS NULL THEN coalesce(a.error, came.reason, 'no reason on record, or not scored yet')
    END AS no_sample_because
FROM refreshed_answers AS a
FULL JOIN (SELECT session_id, turn_id, 0::bigint AS number FROM refresh_asks) AS asked
    USING (session_id, turn_id, number)
LEFT JOIN (
    SELECT refreshed_id, judge, prompt_version, revision, sample_id, NULL AS reason FROM samples
    UNION ALL
    SELECT refreshed_id, judge, prompt_version, revision, NULL, reason FROM refusals
) AS came ON came.refreshed_id = a.event_id::text;

-- What a policy was taught and holds on to, or held: whose words, since when, and how far it is from following them.
CREATE OR REPLACE VIEW hint_memory AS
WITH said AS (
    SELECT
        policy_id,
        hint_id,
        (array_agg(hint ORDER BY source_offset DESC))[1] AS hint,
        bool_or(hint_by_person) AS hint_by_person,
        min(key_name) AS key_name,
        count(*) AS num_said,
        min(log_time) AS first_held_at,
        max(log_time) AS last_held_at,
        max(source_offset) AS newest
    FROM held_hints
    WHERE kind = 'held' AND followed IS NOT TRUE
    GROUP BY policy_id, hint_id
),
rehearsals AS (
    SELECT s.policy_id, r.hint_id, s.policy_version, max(r.open_nats) AS open_nats, count(*) AS num_answers
    FROM steps AS s
    CROSS JOIN LATERAL jsonb_to_recordset(s.rehearsed) AS r(hint_id text, open_nats double precision)
    GROUP BY s.policy_id, r.hint_id, s.policy_version
),
-- As HintMemory.note in clawstream/training/batches/memory.py: of hints that a step looked at, those above OPEN_NATS.
measured AS (
    SELECT policy_id, hint_id, policy_version, open_nats FROM rehearsals WHERE open_nats IS NOT NULL
    UNION ALL
    SELECT s.policy_id, k.hint_id, s.policy_version, k.lost_nats
    FROM steps AS s
    CROSS JOIN LATERAL jsonb_to_recordset(s.kept) AS k(hint_id text, lost_nats double precision)
    WHERE k.lost_nats > 0.05
)
SELECT
    said.policy_id,
    said.hint_id,
    said.hint,
    said.hint_by_person,
    said.key_name,
    said.num_said,
    said.first_held_at,
    said.last_held_at,
    coalesce((SELECT sum(r.num_answers) FROM rehearsals AS r
        WHERE r.policy_id = said.policy_id AND r.hint_id = said.hint_id), 0)::bigint AS num_rehearsed,
    (SELECT max(r.policy_version) FROM rehearsals AS r
        WHERE r.policy_id = said.policy_id AND r.hint_id = said.hint_id) AS rehearsed_for,
    (SELECT m.open_nats FROM measured AS m
        WHERE m.policy_id = said.policy_id AND m.hint_id = said.hint_id
        ORDER BY m.policy_version DESC LIMIT 1) AS open_nats,
    retired.log_time AS retired_at,
    retired.reason AS retired_because
FROM said
LEFT JOIN LATERAL (
    SELECT h.log_time, h.reason FROM held_hints AS h
    WHERE h.kind = 'retired' AND h.policy_id = said.policy_id AND h.hint_id = said.hint_id
        AND h.source_offset > said.newest
    ORDER BY h.source_offset LIMIT 1
) AS retired ON true;

-- The adapter of each API key or agent that has one of its own: what it began with, how far it came, and what is served of it.
CREATE OR REPLACE VIEW adapters AS
SELECT
    substring(p.policy_id FROM position('+' IN p.policy_id) + 1) AS key_name,
    p.policy_id,
    min(p.policy_version) AS began_with,
    max(p.policy_version) AS newest_version,
    (SELECT max(a.policy_version) FROM activations AS a WHERE a.policy_id = p.policy_id) AS served_version,
    (SELECT count(*) FROM steps AS st WHERE st.policy_id = p.policy_id) AS num_updates,
    (SELECT coalesce(sum(st.num_samples), 0)::bigint FROM steps AS st WHERE st.policy_id = p.policy_id) AS num_samples,
    to_timestamp(max(p.published_at_ms) / 1000.0) AS published_at
FROM policies AS p
WHERE p.policy_id LIKE '%+%'
GROUP BY p.policy_id;
