"""Events in readable form: as one line, or as JSON with everything in it. Pure."""

import json
from dataclasses import fields, is_dataclass
from enum import Enum

from clawstream import events
from clawstream.events import Event
from clawstream.stream.stage import Record

MAX_WORDS = 160  # characters of what somebody said
_OWN_BLOCK = '"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>'  # begins a message that OpenClaw itself adds to its requests


def line(event: Event) -> str:
    """Return a summary of the event, in one line without control characters: its own words, or its fields'."""
    return printable(
        _exchange(event)
        or _judging(event)
        or _turn(event)
        or _group(event)
        or _policy(event)
        or _control(event)
        or _by_fields(event)
    )


def printable(text: str, *, kept: str = "") -> str:
    """Return `text` with an escape for each character that a terminal obeys or can't show, except those in `kept`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode() for char in text
    )


def printable_json(text: str) -> str:
    """Return JSON of the same value as `text`, without characters that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def as_dict(record: Record) -> dict[str, object]:
    """Return the record as plain values; JSON that the event holds as bytes is parsed."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "type": type(record.event).__name__,
        "event_id": record.event.event_id,
        "event": _plain(record.event),
    }


def _exchange(event: Event) -> str | None:
    match event:
        case events.ExchangeCompleted():
            versions = ",".join(str(span.policy_version) for span in event.versions)
            said = f"{_last_said(event.request.messages)} -> {_said(event.message)}"
            side = "" if event.turn_type == "main" else f"{event.turn_type.value} "
            return f"{side}v{versions} {len(event.output_ids)} tokens {event.finish_reason.value}: {said}"
        case events.ExchangeFailed():
            got = "" if event.message is None else f" -> {_said(event.message)}, cut off"
            return f"{event.reason.value}: {_short(event.detail)}; asked {_last_said(event.request.messages)}{got}"
        case events.SessionDone():
            return f"done after exchange {event.after_exchange_id}"
        case events.SessionIdle():
            return f"idle for {event.idle_s} s after exchange {event.after_exchange_id}"
    return None


def _turn(event: Event) -> str | None:
    match event:
        case events.TurnPaired():
            cut = " (interrupted)" if event.interrupted else ""
            shown = f"messages {list(event.next_state)} of {event.next_exchange_id}"
            return f"turn {event.turn_id}{cut} is followed by {shown}"
        case events.TurnOrphaned():
            return f"turn {event.turn_id} has no next state: {event.reason.value} by {event.next_exchange_id}"
        case events.TurnsSettled():
            return f"all turns up to {event.after_exchange_id} stand; {'done' if event.done else 'idle'}"
        case events.SampleAssembled():
            hint = f", hint {_short(event.hint)}" if event.hint is not None else ""
            heard = "" if event.num_feedback is None else f" after feedback {event.num_feedback}"
            said = f"reward {event.total_reward}{heard}, {len(event.response_ids)} tokens{hint}"
            return f"turn {event.turn_id}{_answered_again(event)}: {said}"
        case events.SampleRefused():
            what = "the session" if event.turn_id is None else f"turn {event.turn_id}"
            return f"{what}{_answered_again(event)}: {event.reason.value}"
        case events.FeedbackGiven():
            return f"turn {event.turn_id}: {event.source.value} gives {event.score} {_short(event.text or '')}"
        case events.RefreshAsked():
            return f"turn {event.turn_id} is to be answered again: sample {event.sample_id} came too late"
        case events.AnswerRefreshed():
            said = event.error or _said(event.message or b"{}")
            return f"turn {event.turn_id} answered again, {len(event.output_ids)} tokens: {said}"
    return None


def _answered_again(event: events.SampleAssembled | events.SampleRefused) -> str:
    return "" if event.refreshed_id is None else " answered again"


def _group(event: Event) -> str | None:
    match event:
        case events.TrajectoryEnded():
            said = f"{len(event.steps)} steps, outcome {event.outcome}"
            return f"group {event.group_id}: an attempt of session {event.session_id} ended, {said}"
        case events.GroupWaited():
            return f"group {event.group_id}: not waited for any more after {event.wait_s:g} s"
        case events.GroupSettled():
            steps = f"{len(event.advantages)} steps to train on, {len(event.dropped)} dropped"
            return f"group {event.group_id}: settled by {len(event.trajectories)} attempts, {steps}"
        case events.TrajectoryLate():
            late = f"session {event.session_id} is late, {len(event.dropped)} steps dropped"
            return f"group {event.group_id}: {late}"
    return None


def _judging(event: Event) -> str | None:
    match event:
        case events.VoteCast():
            reply = _short(event.text if event.text is not None else event.error or "")
            found = event.score if event.score is not None else event.status.value
            ballot = f"{event.judge} on {event.question.value}, ballot {event.ballot}"
            return f"turn {event.turn_id}: {ballot}: {found}; {reply}"
        case events.VerdictReached():
            votes = f"+{event.num_positive} 0:{event.num_neutral} -{event.num_negative}"
            missing = f", {event.num_unreadable} unreadable, {event.num_failed} failed"
            return f"turn {event.turn_id}: {event.status.value}, score {event.score} ({votes}{missing})"
        case events.HintFound():
            return f"turn {event.turn_id}: {_short(event.hint)}"
        case events.HintAbsent():
            return f"turn {event.turn_id}: no hint, {event.reason.value}"
        case events.TeacherScored():
            by = f"{event.status.value} by {event.teacher}"
            found = f"policy v{event.student_version}" if event.error is None else _short(event.error)
            return f"turn {event.turn_id}: {by}, {found}"
    return None


def _policy(event: Event) -> str | None:
    match event:
        case events.BaseNamed():
            return f"{event.policy_id} begins with {_short(event.path)}, model {(event.model_sha256 or 'unseen')[:12]}"
        case events.BatchPlanned():
            if event.rollback is not None:
                return f"{event.policy_id} v{event.policy_version}: back to v{event.parent_version}"
            return f"{event.policy_id} v{event.policy_version}: {len(event.sample_ids)} samples planned"
        case events.StepTaken():
            took = f"{event.num_samples} samples in {event.step_ms} ms"
            figures = {"loss": event.loss_nats, "kl": event.kl_reference_nats, "reward": event.mean_reward}
            said = "".join(f", {name} {figure:.4f}" for name, figure in figures.items() if figure is not None)
            return f"{event.policy_id} v{event.policy_version}: {took}{said}"
        case events.StepRejected():
            used = f"{event.num_samples} samples are used up"
            return f"{event.policy_id} v{event.policy_version} rejected, {used}: {_short(event.reason)}"
        case events.PolicyPublished():
            return f"{event.policy_id} v{event.policy_version} at {_short(event.path)}"
        case events.PolicyActivated():
            return f"{event.policy_id} v{event.policy_version} on {event.engine} after {event.pause_ms:.1f} ms"
        case events.PolicyRejected():
            return f"{event.policy_id} v{event.policy_version} by {event.engine}: {_short(event.reason)}"
    return None


def _control(event: Event) -> str | None:
    match event:
        case events.ReplayStarted():
            return f"replay {event.replay}: votes from {event.votes_from.value}, judge {event.judge}"
        case events.ReplayEnded():
            return f"replay {event.replay}: {event.num_samples} samples of {event.num_exchanges} exchanges"
        case events.SamplesPromoted():
            said = "the live samples" if event.replay is None else f"the samples of replay {event.replay}"
            return f"{event.policy_id} number {event.number}: {said}"
        case events.RollbackAsked():
            return f"{event.policy_id} number {event.number}: back to version {event.to_version}"
        case events.VersionPinned():
            said = "is kept" if event.pinned else "need not be kept"
            return f"{event.policy_id} number {event.number}: version {event.policy_version} {said}"
    return None


def _by_fields(event: Event) -> str:
    """Return the fields that a person can read, with their names: no ids, hashes or times, and of rows the number."""
    return ", ".join(
        f"{field.name} {shown}"
        for field in fields(event)
        if not field.name.endswith(("_id", "_sha256", "_at_ms"))
        and (shown := _shown(getattr(event, field.name))) is not None
    )


def _shown(value: object) -> str | None:
    if value is None or value == () or is_dataclass(value):
        return None
    if isinstance(value, tuple):
        return f"({len(value)})"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bytes):
        return _said(value)
    return _short(value) if isinstance(value, str) else str(value)


def _last_said(messages: tuple[bytes, ...]) -> str:
    said = [text for message in messages if not (text := _said(message)).startswith(_OWN_BLOCK)]
    return said[-1] if said else "(the same)"


def _said(message: bytes) -> str:
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return _short(message.decode(errors="replace"))
    content = found.get("content") if isinstance(found, dict) else None
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return _short(content) if isinstance(content, str) and content else _short(message.decode(errors="replace"))


def _short(text: str) -> str:
    return f'"{text}"' if len(text) <= MAX_WORDS else f'"{text[: MAX_WORDS - 3]}..."'


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value.decode(errors="replace")
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
