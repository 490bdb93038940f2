"""Each session's sampled answers and newest prompts, from which its next prompt goes on. Pure.

The one rule: forgetting costs tokens and time, never an answer, since a prompt that can't go on is rendered. Sessions
are forgotten when they end, when they are silent for as long as the recorder remembers them, or, once all together hold
more than `MAX_TOKENS`, beginning with the longest silent.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from clawstream.conversation.continuing import Continued
from clawstream.conversation.echoes import ShownAnswer
from clawstream.gateway.outbox.recorder import PARENT_FOR_MS

MAX_TOKENS = 4_000_000  # of all sessions together; a token takes about 36 bytes here
MAX_ANSWERS = 2_048  # of one session; older ones are in no history that fits a context
_PROMPTS = 2  # two, so that a side turn between main turns costs nothing


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
        """Return the session's answers and prompts, empty ones where it is not known."""
        known, _ = self._sessions.get(session_id, (KnownSession(), 0))
        return known if now_ms - known.at_ms <= PARENT_FOR_MS else KnownSession()

    def asked(self, session_id: str, prompt: Continued, now_ms: int) -> None:
        """Remember a prompt of the session."""
        known = self.of(session_id, now_ms)
        others = tuple(one for one in known.prompts if one.token_ids != prompt.token_ids)
        self._remember(session_id, replace(known, prompts=(*others, prompt)[-_PROMPTS:], at_ms=now_ms))

    def answered(self, session_id: str, answer: ShownAnswer, now_ms: int) -> None:
        """Remember an answer of the session."""
        known = self.of(session_id, now_ms)
        self._remember(session_id, replace(known, answers=(*known.answers, answer)[-MAX_ANSWERS:], at_ms=now_ms))

    def forget(self, session_id: str) -> None:
        """Forget the session."""
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
