-- Attempts at one task that have ended, and what became of their groups.
CREATE TABLE ended_trajectories (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    trajectory_id TEXT NOT NULL,
    revision BIGINT NOT NULL,
    ended_at_ms BIGINT NOT NULL,
    group_size BIGINT,
    outcome DOUBLE PRECISION,
    steps JSONB NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX ended_trajectories_by_group ON ended_trajectories (group_id);
CREATE INDEX ended_trajectories_in_session_order ON ended_trajectories (session_id, source_partition, source_offset);

CREATE TABLE groups (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    group_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    wait_s DOUBLE PRECISION,
    trajectories TEXT[],
    complete BOOLEAN,
    advantages JSONB,
    dropped JSONB,
    trajectory TEXT,
    session_id TEXT,
    PRIMARY KEY (event_id)
);
CREATE INDEX groups_by_group ON groups (group_id, source_offset);

-- Each step of a group that was settled, or came after that; `reason` is why it is not trained on.
CREATE VIEW group_steps AS
SELECT g.group_id, s.step_index, s.turn_id, s.sample_id, s.reward, s.advantage, NULL::text AS reason, g.log_time
FROM groups AS g
CROSS JOIN LATERAL jsonb_to_recordset(g.advantages)
    AS s(step_index bigint, turn_id text, sample_id text, reward double precision, advantage double precision)
UNION ALL
SELECT g.group_id, s.step_index, s.turn_id, s.sample_id, NULL, NULL, s.reason, g.log_time
FROM groups AS g
CROSS JOIN LATERAL jsonb_to_recordset(g.dropped)
    AS s(step_index bigint, turn_id text, sample_id text, reason text);
