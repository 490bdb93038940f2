"""Why an answer given anew is no sample, and a view of what came of each prompt that was to be answered anew."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_OUTCOMES = """
CREATE VIEW refreshed_outcomes AS
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
) AS came ON came.refreshed_id = a.event_id::text
"""


def upgrade() -> None:
    """Add the column and the view; until now nothing said why."""
    op.add_column("refusals", sa.Column("refreshed_id", sa.Text))
    op.execute(_OUTCOMES)
