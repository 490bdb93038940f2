"""What a person says to a real OpenClaw when things do not go smoothly, and to which answer each word belongs."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from tests.fakes.scripted_engine import ScriptedBackend
from tests.system.openclaw.chatting import Chat
from tests.system.openclaw.dialogue import COUNTED, DELEGATING, REPORTED, SUMMED_UP, UNDER_WAY
from tests.system.openclaw.policy import Line, Script

BUSY = ("steer", "collect")  # sessions where the person goes on talking while a tool runs
COMPACTED = "compact"
NUMBERS = ("One.", "Two.", "Three.", "Four.", "Five.", "Six.", "Seven.")
LONG = Line(heard="Please talk for long", content="Once upon a time", stalls=True)
LOOKING = Line(heard="Please settle it", calls=(("exec", '{"command": "echo sett-$((1+1))"}'),))
INVENTED = Line(heard="Please use the unknown tool", calls=(("frobnicate", '{"a": 1}'),))


def waiting(session: str) -> Line:
    """A command that says when it has begun, and ends when it may."""
    command = f"touch begun-{session}; until [ -e go-{session} ]; do sleep 0.1; done; echo slow-$((1+1))done"
    return Line(
        heard=f"Please wait for it in {session}",
        calls=(("exec", json.dumps({"command": command, "yieldMs": 120_000})),),
    )


# The first that fits is said: what was said last stands before what an interrupted answer left unanswered.
LINES = (
    REPORTED, COUNTED, UNDER_WAY, SUMMED_UP,
    Line(heard="did not produce a user-visible answer", content="In plain words."),
    Line(heard="More.", content="More it is."),
    Line(heard="Thanks.", content="You are welcome."),
    Line(heard="And in red.", content="Red."),
    Line(heard="And do it in blue.", content="Blue."),
    Line(heard="That is wrong", content="Better so."),
    Line(heard="slow-2done", content="Slowly done."),
    Line(heard="sett-2"),
    Line(heard="Tool frobnicate not found", content="There is no such tool."),
    LONG, LOOKING, INVENTED, DELEGATING, *map(waiting, BUSY),
    Line(heard="Please be empty"),
    Line(heard="Please only think", reasoning="What a thought."),
    *(Line(heard=number, content=f"{number[:-1]} it is.") for number in reversed(NUMBERS)),
)  # fmt: skip

_INTERRUPTED = [
    ("One it is.", "person: Please talk for long."),
    (LONG.content, "person: That is wrong, shorter."),
    ("Better so.", "person: Thanks."),
    ("You are welcome.", "person: More."),
]
_PLAIN = [("In plain words.", "person: That is wrong."), ("Better so.", "person: More.")]
# The answer, and who said what to it, session by session. The last answer of each waits for its reaction.
REACTIONS = {
    "abort": _INTERRUPTED,
    "stop": _INTERRUPTED,
    "unknown": [
        ("calls frobnicate", "Tool frobnicate not found"),
        ("There is no such tool.", "person: That is wrong."),
        ("Better so.", "person: More."),
    ],
    "empty": _PLAIN,
    "think": _PLAIN,
    "settle": [("calls exec", "sett-2"), *_PLAIN],
    "steer": [
        ("calls exec", "slow-2done / person: And do it in blue. / person: And in red."),
        ("Red.", "person: Thanks."),
        ("You are welcome.", "person: More."),
    ],
    "collect": [
        ("calls exec", "slow-2done"),
        ("Slowly done.", "person: And do it in blue.\n\nAnd in red."),
        ("Red.", "person: Thanks."),
        ("You are welcome.", "person: More."),
    ],
    "delegate": [
        ("calls tool_call", '{\n  "tool": {\n    "id": "openclaw:core:sessions_spawn",\n    '),
        (UNDER_WAY.content, "environment: A background task completed. Use this result to"),
        (REPORTED.content, "person: That is wrong."),
        ("Better so.", "person: More."),
    ],
    COMPACTED: [
        (f"{one[:-1]} it is.", f"person: {other}") for one, other in pairwise(NUMBERS)
    ],
}  # fmt: skip
NUM_REACTIONS = sum(map(len, REACTIONS.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Who talks in one session."""

    session: str
    chat: Chat
    engine: ScriptedBackend
    workspace: Path
    until: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

    async def say(self, text: str) -> None:
        """Say it, and wait until it is answered."""
        num_before = len(self.engine.calls)
        await self.chat.over(await self.chat.send(self.session, text))
        await self.heard(text, num_before)

    async def heard(self, text: str, num_before: int) -> None:
        """Return once the policy has answered this."""

        async def answered() -> bool:
            script = self.engine.script
            assert isinstance(script, Script)
            new = [call for call in self.engine.calls[num_before:] if text in script.heard(call.request.input_ids)]
            return bool(new) and self.engine.running.keys().isdisjoint(call.rid for call in new)

        await self.until(answered)

    async def command(self, text: str) -> None:
        """Say something that OpenClaw answers by itself."""
        await self.chat.over(await self.chat.send(self.session, text))

    async def all_of(self, *texts: str) -> None:
        """Say one after the other."""
        for text in texts:
            await self.say(text)

    async def interrupted(self) -> None:
        """Have an answer under way, and stop it as the session's name says."""
        await self.say("One.")
        run = await self.chat.send(self.session, "Please talk for long.")
        await self.chat.speaking(run)
        if self.session == "abort":
            await self.chat.abort(self.session, run)
        else:
            await self.chat.send(self.session, "/stop")
        await self.chat.over(run)
        await self.all_of("That is wrong, shorter.", "Thanks.", "More.")

    async def queueing(self) -> None:
        """Go on talking while a tool runs."""
        if self.session != "steer":
            await self.command(f"/queue {self.session}")
        num_before = len(self.engine.calls)
        run = await self.chat.send(self.session, f"Please wait for it in {self.session}.")
        await self.until(self._begun)
        for text in ("And do it in blue.", "And in red."):
            await self.chat.send(self.session, text)
        # Both wait in OpenClaw's queue once a message that came later, by the same way, is answered elsewhere.
        await replace(self, session=f"beside_{self.session}").say("Thanks.")
        (self.workspace / f"go-{self.session}").touch()
        await self.chat.over(run)
        await self.heard("And in red.", num_before)
        await self.all_of("Thanks.", "More.")

    async def _begun(self) -> bool:
        return (self.workspace / f"begun-{self.session}").exists()

    async def delegating(self) -> None:
        """Have a helper asked, and hear its report."""
        num_before = len(self.engine.calls)
        await self.say("Please delegate.")
        await self.heard(REPORTED.heard, num_before)
        await self.all_of("That is wrong.", "More.")

    async def compacting(self) -> None:
        """Have all that was said summed up in the middle of seven turns."""
        await self.all_of(*NUMBERS[:3])
        await self.command("/compact")
        await self.all_of(*NUMBERS[3:])


async def tell(person: Callable[[str], Person]) -> None:
    """All sessions, one after the other."""
    for session in ("abort", "stop"):
        await person(session).interrupted()
    asked = {
        "unknown": "Please use the unknown tool.",
        "empty": "Please be empty.",
        "think": "Please only think.",
        "settle": "Please settle it.",
    }
    for session, text in asked.items():
        await person(session).all_of(text, "That is wrong.", "More.")
    for session in BUSY:
        await person(session).queueing()
    await person("delegate").delegating()
    await person(COMPACTED).compacting()
