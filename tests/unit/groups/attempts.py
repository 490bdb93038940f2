"""Sessions that are attempts at a task."""

from clawstream.events import FeedbackSource
from tests.sessions import Session, assistant, user


def attempt(
    *step_indices: int | None,
    session_id: str = "s",
    group_id: str | None = "task",
    size: int | None = 2,
    outcome: float | None = None,
) -> Session:
    """A session of so many steps; the last has no next state, and the outcome is said of it before the end."""
    session, messages = Session(session_id, group_id=group_id, group_size=size), [user("begin")]
    for number, step_index in enumerate(step_indices):
        last = session.ask(messages, f"{session_id} answer {number}", step_index=step_index)
        messages = [*messages, assistant(f"{session_id} answer {number}"), user(f"result {number}")]
    if outcome is not None:
        session.rate(last.exchange_id, outcome, FeedbackSource.ENVIRONMENT)
    session.done()
    return session
