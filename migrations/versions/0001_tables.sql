-- Frozen with revision 0001: a change to clawstream/projections/tables.py is a revision of its own.

CREATE TABLE exchanges (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    exchange_id TEXT NOT NULL,
    turn_type TEXT NOT NULL,
    client TEXT NOT NULL,
    model TEXT NOT NULL,
    parent_exchange_id TEXT,
    kept_messages BIGINT NOT NULL,
    kept_tokens BIGINT NOT NULL,
    messages JSONB NOT NULL,
    token_ids INTEGER[] NOT NULL,
    options JSONB,
    request_sha256 TEXT,
    retry_count BIGINT,
    sampling JSONB,
    policy_id TEXT NOT NULL,
    versions JSONB,
    message JSONB,
    output_ids INTEGER[] NOT NULL,
    output_logprobs REAL[],
    finish_reason TEXT,
    cached_tokens BIGINT,
    trace_id TEXT,
    reason TEXT,
    status BIGINT,
    detail TEXT,
    received_at_ms BIGINT NOT NULL,
    first_token_at_ms BIGINT,
    finished_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX exchanges_by_exchange_id ON exchanges (exchange_id, kind);
CREATE INDEX exchanges_in_log_order ON exchanges (source_partition, source_offset);
CREATE INDEX exchanges_in_session_order ON exchanges (session_id, source_partition, source_offset);

CREATE TABLE session_ends (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    after_exchange_id TEXT,
    idle_s BIGINT,
    PRIMARY KEY (event_id)
);
CREATE INDEX session_ends_in_session_order ON session_ends (session_id, source_partition, source_offset);

CREATE TABLE sessions (
    session_id TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    first_offset BIGINT NOT NULL,
    first_at TIMESTAMP WITH TIME ZONE NOT NULL,
    last_offset BIGINT NOT NULL,
    last_at TIMESTAMP WITH TIME ZONE NOT NULL,
    client TEXT,
    model TEXT,
    num_main BIGINT NOT NULL,
    num_side BIGINT NOT NULL,
    num_failed BIGINT NOT NULL,
    done_at TIMESTAMP WITH TIME ZONE,
    idle_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (session_id)
);

CREATE TABLE turns (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    next_exchange_id TEXT NOT NULL,
    next_state INTEGER[],
    reason TEXT,
    PRIMARY KEY (event_id)
);
CREATE INDEX turns_by_turn ON turns (turn_id);
CREATE INDEX turns_in_session_order ON turns (session_id, source_partition, source_offset);

CREATE TABLE settlements (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    after_exchange_id TEXT NOT NULL,
    done BOOLEAN NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX settlements_in_session_order ON settlements (session_id, source_partition, source_offset);

CREATE TABLE votes (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    judge TEXT NOT NULL,
    prompt_version TEXT NOT NULL,
    revision BIGINT NOT NULL,
    question TEXT NOT NULL,
    ballot BIGINT NOT NULL,
    status TEXT NOT NULL,
    score BIGINT,
    hint TEXT,
    text TEXT,
    error TEXT,
    prompt_tokens BIGINT,
    completion_tokens BIGINT,
    latency_ms BIGINT NOT NULL,
    cast_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX votes_by_turn ON votes (turn_id);
CREATE INDEX votes_in_session_order ON votes (session_id, source_partition, source_offset);

CREATE TABLE verdicts (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    judge TEXT NOT NULL,
    prompt_version TEXT NOT NULL,
    revision BIGINT NOT NULL,
    status TEXT NOT NULL,
    score BIGINT,
    num_positive BIGINT NOT NULL,
    num_neutral BIGINT NOT NULL,
    num_negative BIGINT NOT NULL,
    num_unreadable BIGINT NOT NULL,
    num_failed BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX verdicts_by_turn ON verdicts (turn_id);
CREATE INDEX verdicts_in_session_order ON verdicts (session_id, source_partition, source_offset);

CREATE TABLE hints (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    judge TEXT NOT NULL,
    prompt_version TEXT NOT NULL,
    revision BIGINT NOT NULL,
    kind TEXT NOT NULL,
    hint TEXT,
    num_offered BIGINT,
    reason TEXT,
    PRIMARY KEY (event_id)
);
CREATE INDEX hints_by_turn ON hints (turn_id);
CREATE INDEX hints_in_session_order ON hints (session_id, source_partition, source_offset);

CREATE TABLE feedback (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    feedback_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    source TEXT NOT NULL,
    score DOUBLE PRECISION,
    text TEXT,
    given_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX feedback_by_turn ON feedback (turn_id);
CREATE INDEX feedback_in_session_order ON feedback (session_id, source_partition, source_offset);

CREATE TABLE samples (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    judge TEXT NOT NULL,
    prompt_version TEXT NOT NULL,
    revision BIGINT NOT NULL,
    sample_id TEXT GENERATED ALWAYS AS (event_id::text) STORED NOT NULL,
    reward BIGINT,
    hint TEXT,
    prompt_ids INTEGER[] NOT NULL,
    hinted_prompt_ids INTEGER[],
    response_ids INTEGER[] NOT NULL,
    response_logprobs REAL[] NOT NULL,
    trained SMALLINT[] NOT NULL,
    temperature DOUBLE PRECISION NOT NULL,
    policy_id TEXT NOT NULL,
    versions JSONB NOT NULL,
    num_earlier_turns BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX samples_by_sample_id ON samples (sample_id);
CREATE INDEX samples_by_turn ON samples (turn_id);
CREATE INDEX samples_in_session_order ON samples (session_id, source_partition, source_offset);

CREATE TABLE refusals (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id TEXT NOT NULL,
    turn_id TEXT,
    judge TEXT,
    prompt_version TEXT,
    revision BIGINT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX refusals_in_session_order ON refusals (session_id, source_partition, source_offset);

CREATE TABLE batches (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    policy_id TEXT NOT NULL,
    policy_version BIGINT NOT NULL,
    parent_version BIGINT NOT NULL,
    sample_ids TEXT[] NOT NULL,
    offsets JSONB NOT NULL,
    seed BIGINT NOT NULL,
    settings JSONB NOT NULL,
    planned_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX batches_by_version ON batches (policy_id, policy_version);

CREATE TABLE steps (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    policy_id TEXT NOT NULL,
    policy_version BIGINT NOT NULL,
    num_samples BIGINT NOT NULL,
    num_hinted BIGINT NOT NULL,
    num_rewarded BIGINT NOT NULL,
    num_tokens BIGINT NOT NULL,
    num_tokens_dropped BIGINT NOT NULL,
    loss_nats DOUBLE PRECISION,
    kl_reference_nats DOUBLE PRECISION,
    mean_gap_nats DOUBLE PRECISION,
    mean_reward DOUBLE PRECISION,
    clipped_share DOUBLE PRECISION,
    grad_norm DOUBLE PRECISION,
    learning_rate DOUBLE PRECISION NOT NULL,
    mean_versions_behind DOUBLE PRECISION NOT NULL,
    max_versions_behind BIGINT NOT NULL,
    step_ms BIGINT NOT NULL,
    taken_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX steps_by_version ON steps (policy_id, policy_version);

CREATE TABLE policies (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    policy_id TEXT NOT NULL,
    policy_version BIGINT NOT NULL,
    parent_version BIGINT,
    path TEXT NOT NULL,
    manifest_sha256 TEXT,
    num_bytes BIGINT NOT NULL,
    published_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX policies_by_version ON policies (policy_id, policy_version);

CREATE TABLE activations (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    policy_id TEXT NOT NULL,
    policy_version BIGINT NOT NULL,
    engine TEXT NOT NULL,
    pause_ms DOUBLE PRECISION NOT NULL,
    num_bytes BIGINT NOT NULL,
    activated_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX activations_by_version ON activations (policy_id, policy_version);

CREATE TABLE rejections (
    event_id UUID NOT NULL,
    source_topic TEXT NOT NULL,
    source_partition INTEGER NOT NULL,
    source_offset BIGINT NOT NULL,
    log_time TIMESTAMP WITH TIME ZONE NOT NULL,
    policy_id TEXT NOT NULL,
    policy_version BIGINT NOT NULL,
    engine TEXT NOT NULL,
    reason TEXT NOT NULL,
    rejected_at_ms BIGINT NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX rejections_by_version ON rejections (policy_id, policy_version);

CREATE TABLE offsets (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    next_offset BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    PRIMARY KEY (topic, partition)
);

CREATE TABLE commits (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    next_offset BIGINT NOT NULL,
    first_offset BIGINT NOT NULL,
    committed_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (topic, partition, next_offset)
);
