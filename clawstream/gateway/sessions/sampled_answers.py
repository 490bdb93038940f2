"""What was sampled in each session, and the prompts last made for it, so that the next goes on from them. Pure.

The one rule: what is forgotten here costs tokens and time, never an answer: a prompt that can't go on is rendered.
Sessions that end, or are silent for as long as the recorder knows them, are forgotten; so are those silent longest
once all hold `MAX_TOKENS`.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from clawstream.conversation.continuing import Continued
from clawstream.conversation.echoes import ShownAnswer
from clawstream.gateway.outbox.recorder import PARENT_FOR_MS

MAX_TOKENS = 4_000_000  # of all sessions together; a token takes about 36 bytes here
MAX_ANSWERS = 2_048  # of one session; older ones are in no history that fits a context
_PROMPTS = 2  # so that a side turn between two others costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSession:
    """One session: its answers and its newest prompts, oldest first."""

    answers: tuple[ShownAnswer, ...] = ()
    prompts: tuple[Continued, ...] = ()
    at_ms: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens are held for it."""
        held = sum(len(answer.output_ids) for answer in self.answers)
        return held + sum(len(prompt.token_ids) for prompt in self.prompts)


class SampledAnswers:
    """Sessions by id; time comes in as an argument."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[str, tuple[KnownSession, int]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, session_id: str, now_ms: int) -> KnownSession:
        """Return what is known of the session."""
        known, _ = self._sessions.get(session_id, (KnownSession(), 0))
        return known if now_ms - known.at_ms <= PARENT_FOR_MS else KnownSession()

    def asked(self, session_id: str, prompt: Continued, now_ms: int) -> None:
        """The session was asked with this prompt."""
        known = self.of(session_id, now_ms)
        others = tuple(one for one in known.prompts if one.token_ids != prompt.token_ids)
        self._remember(session_id, replace(known, prompts=(*others, prompt)[-_PROMPTS:], at_ms=now_ms))

    def answered(self, session_id: str, answer: ShownAnswer, now_ms: int) -> None:
        """The session was answered this."""
        known = self.of(session_id, now_ms)
        self._remember(session_id, replace(known, answers=(*known.answers, answer)[-MAX_ANSWERS:], at_ms=now_ms))

    def forget(self, session_id: str) -> None:
        """The session is over."""
        _, num_tokens = self._sessions.pop(session_id, (None, 0))
        self._num_tokens -= num_tokens

    def _remember(self, session_id: str, known: KnownSession) -> None:
        self.forget(session_id)
        self._sessions[session_id] = known, known.num_tokens
        self._num_tokens += known.num_tokens
        while len(self._sessions) > 1:
            oldest, (others, _) = next(iter(self._sessions.items()))
            if self._num_tokens <= self._max_tokens and known.at_ms - others.at_ms <= PARENT_FOR_MS:
                return
            self.forget(oldest)
