"""Turns sampled tokens, as they come, into deltas for the client: content, reasoning and tool calls. Pure.

The one rule: however tokens are cut into chunks, the deltas add up to the recorded message, and none is taken back. So
text that may turn out otherwise is held: outer white space, half characters, the possible beginning of a stop string. A
tool call is sent whole, once it is closed and no later mark can turn it into reasoning. Where only the answer's end
closes a call (Llama 3: the answer is JSON), or a grammar forces calls, everything is sent at the end.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from clawstream.gateway.requests.wire import assistant_message
from clawstream.rendering.calling import offers_tools
from clawstream.rendering.renderer import HALF_CHARACTER, CalledTool, ParsedAnswer, PromptRenderer

_MOST_HALVES = 3  # an incomplete character decodes to so many replacement characters at most; more are invalid bytes
_MOST_WAITING = 64  # tokens since the last whole character; after that, invalid bytes are released too
_READ_AGAIN_AFTER = 0.02  # share by which an answer grows between two readings while the field is unknown


class _Field(Enum):
    """The field that the next plain token belongs to."""

    UNKNOWN = "unknown"
    CONTENT = "content"
    REASONING = "reasoning"
    TOOLS = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A whole tool call, as the client sees it."""

    index: int
    call_id: str
    name: str
    arguments: str  # JSON

    def as_dict(self) -> dict[str, Any]:
        """Return the call as a message holds it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ReplyDelta(NamedTuple):
    """New content, reasoning or calls, at least one of them. A tuple for speed: one is made for every few tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the delta as a chunk of the stream holds it."""
        delta: dict[str, Any] = {}
        if self.reasoning:
            delta["reasoning_content"] = self.reasoning
        if self.content:
            delta["content"] = self.content
        if self.tool_calls:
            delta["tool_calls"] = [{"index": call.index} | call.as_dict() for call in self.tool_calls]
        return delta


@dataclass(slots=True)
class _Text:
    """One field of the message: its text so far, and how much of it was streamed."""

    stops: tuple[str, ...]
    marks: tuple[str, ...] = ()  # kept in the text, but held until they are whole
    text: str = ""
    num_sent: int = 0
    stopped: bool = False

    def read(self, text: str) -> bool:
        """Take over the text of a reading, unless it takes back streamed text; return whether it is longer."""
        grew = len(text) > len(self.text)
        if not self.stopped and text.startswith(self.text[: self.num_sent]):
            self.text = text
        return grew

    def release(self, *, ended: bool) -> str:
        """Return what may be streamed now, up to a stop string."""
        if self.num_sent == len(self.text):
            return ""
        found = [(at + len(stop), at) for stop in self.stops if (at := self.text.find(stop, self.num_sent)) >= 0]
        if found:
            # Of several stop strings, the one that was complete first counts, as if tokens came one by one.
            self.text, self.stopped = self.text[: min(found)[1]], True
        shown = self.text
        if not ended and not self.stopped:
            shown = shown[: self._before_half_stop()].rstrip(HALF_CHARACTER)
        limit = len(shown if self.stopped else shown.rstrip())
        new = self.text[self.num_sent : max(limit, self.num_sent)]
        self.num_sent += len(new)
        return new

    def drop_half_of(self, stop: str) -> None:
        """Cut off the longest tail of `stop` that ends the text: the head of `stop` may be missing from it."""
        for start in range(len(stop)):
            if self.text.endswith(stop[start:]):
                self.text = self.text[: max(len(self.text) - len(stop) + start, self.num_sent)]
                return

    def keep_space(self, space: str) -> None:
        """End the text with this white space, since it stood before a stop string."""
        shown = self.text.rstrip()
        if len(shown) + len(space) >= self.num_sent:
            self.text, self.stopped = shown + space, True

    def _before_half_stop(self) -> int:
        if self.num_sent == 0 and any(stop.lstrip().startswith(self.text) for stop in self.stops):
            return 0  # hidden white space before the text may be the stop's beginning
        held, end = self.stops + self.marks, len(self.text)
        if not held:
            return end
        start = max(self.num_sent, end - max(map(len, held)) + 1)
        return next((at for at in range(start, end) if any(one.startswith(self.text[at:]) for one in held)), end)

    @property
    def sent(self) -> str:
        """The text that the client has."""
        return self.text[: self.num_sent]


@dataclass(slots=True, kw_only=True)
class AnswerStream:
    """One growing answer: `feed` takes sampled tokens, `finish` ends it; both return the delta to stream.

    The model family's parser reads the whole answer again at each marker token. Between markers, plain tokens extend
    the field that grew at the last reading, so that a long answer is not read again at each token.
    """

    renderer: PromptRenderer
    prompt_ids: Sequence[int]
    options: Mapping[str, Any]
    exchange_id: str
    stop: tuple[str, ...] = ()
    content_numbers: set[int] = field(default_factory=set)  # positions of content's tokens; its reader empties it
    ids: list[int] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    _content: _Text = field(init=False)
    _reasoning: _Text = field(init=False)
    _growing: _Field = _Field.UNKNOWN
    _num_calls_sent: int = 0
    _num_shown: int = 0  # tokens whose text the fields hold, while the growing field is known
    _num_read: int = 0  # tokens that were read into the fields, with or without text
    _context: str = ""  # the text of the last shown token, which some tokenizers need to decode the next
    _marked_at: int = 0  # the number of tokens up to the last marker
    _counted_to: int = 0  # up to here it is decided which tokens are content's
    _read_again_at: int = 0
    _forced: bool = field(init=False)  # a grammar may spell marks in plain tokens: the answer is read at its end
    _thinking: bool = True  # reasoning grew last; some models return to reasoning after content

    def __post_init__(self) -> None:
        self._content = _Text(self.stop, self.renderer.text_marks)
        self._reasoning = _Text(self.stop, self.renderer.text_marks)
        self._forced = self.renderer.follows_grammar(self.options, self.prompt_ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string came; nothing is shown after it."""
        return self._content.stopped or self._reasoning.stopped

    @property
    def num_sent_tokens(self) -> int | None:
        """The number of tokens whose text was all released; None while some of it is held."""
        held = self._content.num_sent < len(self._content.text) or self._reasoning.num_sent < len(self._reasoning.text)
        calling = self._growing is _Field.TOOLS or self._num_calls_sent < len(self.tool_calls)
        return None if held or calling else self._num_read

    def feed(self, token_ids: Sequence[int]) -> ReplyDelta | None:
        """Return the delta that the new tokens allow; None: nothing yet."""
        if not token_ids:
            return None
        if self.renderer.marker_ids.isdisjoint(token_ids):
            return self._feed(token_ids)
        deltas = [self._feed(piece) for piece in _up_to_markers(token_ids, self.renderer.marker_ids)]
        return _joined([delta for delta in deltas if delta is not None])

    def finish(self, matched_stop: str | None = None) -> ReplyDelta | None:
        """Return the held text; afterwards `message` is whole. `matched_stop` is the string the engine stopped at."""
        if not self.stopped:
            before = self._content.text
            self._read(ended=True)
            if self._forced:
                self._count_content_behind_thought()
            else:
                self._count_content(before, len(self.ids))
            newest = self._content if self._content.text else self._reasoning
            if matched_stop is not None and matched_stop not in newest.text:
                newest.drop_half_of(matched_stop)
                before, _, _ = self.renderer.decode(self.ids).rpartition(matched_stop)
                if newest.text and before.rstrip().endswith(newest.text.rstrip()):
                    newest.keep_space(before[len(before.rstrip()) :])
        return self._release(ended=True)

    def _feed(self, piece: Sequence[int]) -> ReplyDelta | None:
        """Take in tokens of which only the last may be a marker."""
        self.ids.extend(piece)
        if self.stopped or self._forced:
            return None
        before, is_marked = self._content.text, piece[-1] in self.renderer.marker_ids
        if is_marked:
            self._marked_at = len(self.ids)
            self._read(ended=False)
        elif self._growing is _Field.UNKNOWN:
            if len(self.ids) >= self._read_again_at:
                self._read(ended=False)
        elif self._growing is not _Field.TOOLS:
            self._extend()
        self._count_content(before, len(self.ids) - is_marked)
        if is_marked:
            self._counted_to = len(self.ids)
        return self._release(ended=False)

    def _count_content(self, before: str, end: int) -> None:
        """Count all tokens up to `end` that are not counted yet as content's, if content grew since it was `before`.

        They are of one field, since only a marker changes the field.
        """
        if not self._content.text:
            self.content_numbers.clear()  # also if content turned out to be reasoning
        elif self._content.text != before:
            self.content_numbers.update(range(self._counted_to, end))
            self._counted_to = end

    def _count_content_behind_thought(self) -> None:
        """Count the first token of content and all after it, but no stop tokens, as content's."""
        if self._content.text:
            read = range(len(self.ids))
            first = bisect_left(read, True, key=lambda at: bool(self._parse(at + 1, ended=False).content))
            self.content_numbers.update(at for at in read[first:] if self.ids[at] not in self.renderer.stop_token_ids)

    def num_thought_tokens(self) -> int | None:
        """Return the number of reasoning tokens of a finished answer, without markers; None: unknown.

        It is unknown if the model's marks of reasoning are not single tokens.
        """
        if not self._reasoning.text:
            return 0
        ends = [at + 1 for at, token in enumerate(self.ids) if token in self.renderer.marker_ids]
        found = start = num_thought = num_said = 0
        for end in (*ends, len(self.ids)):
            parsed = self._parse(end, ended=False)
            if num_said and not parsed.content:
                found = start = 0  # the supposed content was reasoning
            if len(parsed.reasoning) > num_thought:
                if self.renderer.text_marks or len(parsed.content) > num_said:
                    return None
                found += sum(token not in self.renderer.marker_ids for token in self.ids[start:end])
            num_thought, num_said, start = len(parsed.reasoning), len(parsed.content), end
            if num_thought >= len(self._reasoning.text):
                break
        return found

    def message(self) -> dict[str, Any]:
        """Return the assistant message, exactly as streamed."""
        thought = [self._reasoning.sent] if self._reasoning.sent else []
        return assistant_message([self._content.sent], thought, [call.as_dict() for call in self.tool_calls])

    def _read(self, *, ended: bool) -> None:
        """Read the whole answer again, and find the field that further plain tokens extend."""
        parsed = self._parse(len(self.ids), ended=ended)
        self._num_read = len(self.ids)
        content_grew = self._content.read(parsed.content)
        reasoning_grew = self._reasoning.read(parsed.reasoning)
        if content_grew or reasoning_grew:
            self._thinking = reasoning_grew
        growth = min(len(self.ids) - self._marked_at, int(len(self.ids) * _READ_AGAIN_AFTER))
        self._read_again_at = len(self.ids) + max(growth, 1)
        self._growing = _Field.UNKNOWN
        if len(parsed.tool_calls) > len(self.tool_calls):
            calls = parsed.tool_calls if ended else self._closed(parsed.tool_calls)
            for call in calls[len(self.tool_calls) :]:
                self.tool_calls.append(self._named(len(self.tool_calls), call))
        if ended:
            return
        if parsed.unfinished:
            self._growing = _Field.UNKNOWN if self.renderer.listed_tool_calls else _Field.TOOLS
        elif content_grew or reasoning_grew:
            self._settle(parsed)

    def _closed(self, calls: Sequence[CalledTool]) -> Sequence[CalledTool]:
        """Return the `calls` that would stay calls if `</think>` came next; no other mark can undo a call."""
        ids = (*self.ids, *self.renderer.encode("</think>"))
        left = self.renderer.parse(ids, self.prompt_ids, self.options, ended=False).tool_calls
        same = next((at for at, (call, other) in enumerate(zip(calls, left, strict=False)) if call != other), None)
        return calls[: min(len(calls), len(left)) if same is None else same]

    def _settle(self, parsed: ParsedAnswer) -> None:
        """Set the field that plain tokens extend: the one that ends with the newest token, if that is certain."""
        last = self.renderer.decode(self.ids[-1:])
        if not last.strip() or last[-1].isspace() or HALF_CHARACTER in last or self.ids[-1] in self.renderer.marker_ids:
            return
        before = self._parse(len(self.ids) - 1, ended=False)
        if parsed.reasoning == before.reasoning and len(parsed.content) > len(before.content):
            growing, text = _Field.CONTENT, parsed.content
        elif parsed.content == before.content and len(parsed.reasoning) > len(before.reasoning):
            growing, text = _Field.REASONING, parsed.reasoning
        else:
            return
        if text.endswith(last.lstrip()):
            self._growing, self._num_shown, self._context = growing, len(self.ids), last

    def _extend(self) -> None:
        self._thinking = self._growing is _Field.REASONING
        shown = self._reasoning if self._thinking else self._content
        start = len(shown.text)
        shown.text += self._new_text()
        self._num_read = self._num_shown
        if any(shown.text.find(mark, max(start - len(mark) + 1, 0)) >= 0 for mark in self.renderer.text_marks):
            self._read(ended=False)

    def _new_text(self) -> str:
        """Return the text of the plain tokens that no field holds yet, without an incomplete last character."""
        pieces = [self.renderer.piece(token) for token in self.ids[self._num_shown :]]
        whole = [piece for piece in pieces if piece is not None]
        if len(whole) == len(pieces):
            self._num_shown, self._context = len(self.ids), whole[-1]
            return "".join(whole)
        first = self._num_shown - 1
        text = self.renderer.decode(self.ids[first:])[len(self._context) :]
        halves = min(len(text) - len(text.rstrip(HALF_CHARACTER)), _MOST_HALVES)
        if len(self.ids) - first > _MOST_WAITING:
            halves = 0
        known = text[: len(text) - halves]
        if halves:
            self._context += known
        else:
            self._num_shown, self._context = len(self.ids), self.renderer.decode(self.ids[-1:])
        return known

    def _parse(self, num_tokens: int, *, ended: bool) -> ParsedAnswer:
        return self.renderer.parse(self.ids[:num_tokens], self.prompt_ids, self.options, ended=ended)

    def _named(self, index: int, call: CalledTool) -> ToolCall:
        # Some clients strip all but letters and digits from ids, so the gateway's ids have nothing else.
        call_id = call.native_id
        if call_id is None or any(call_id == known.call_id for known in self.tool_calls):
            call_id = f"call{self.exchange_id.replace('-', '')[:20]}{index:02d}"
        return ToolCall(index=index, call_id=call_id, name=call.name, arguments=call.arguments)

    def _release(self, *, ended: bool) -> ReplyDelta | None:
        if not ended and self._may_be_bare_call():
            return None
        reasoning = self._reasoning.release(ended=ended or not self._thinking)
        content = "" if self._reasoning.stopped else self._content.release(ended=ended)
        if self.stopped and not ended:
            del self.tool_calls[self._num_calls_sent :]  # calls after the stop string
        calls = tuple(self.tool_calls[self._num_calls_sent :])
        self._num_calls_sent = len(self.tool_calls)
        if not (reasoning or content or calls):
            return None
        return ReplyDelta(content=content, reasoning=reasoning, tool_calls=calls)

    def _may_be_bare_call(self) -> bool:
        return (
            self.renderer.bare_tool_calls
            and offers_tools(self.options)
            and not self._content.num_sent
            and self._content.text.lstrip().startswith("{")
        )


def _up_to_markers(token_ids: Iterable[int], markers: frozenset[int]) -> Iterator[list[int]]:
    """Cut tokens after each marker."""
    piece: list[int] = []
    for token in token_ids:
        piece.append(token)
        if token in markers:
            yield piece
            piece = []
    if piece:
        yield piece


def _joined(deltas: Sequence[ReplyDelta]) -> ReplyDelta | None:
    if not deltas:
        return None
    contents, reasonings, calls = zip(*deltas, strict=True)
    return ReplyDelta("".join(contents), "".join(reasonings), tuple(chain.from_iterable(calls)))
