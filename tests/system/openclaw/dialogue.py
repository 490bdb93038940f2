"""What is said in the end-to-end test, by people and by the policy, and what must come of it."""

from dataclasses import dataclass

from tests.system.openclaw.policy import Line

SILENT = "NO_REPLY"
LONG_ANSWER = Line(heard="Please talk for long", content="and so on " * 400)

FIVE = Line(heard="What is 2+2?", content="It is 5.")
STEPS = Line(heard="Wrong, please show the steps", content="One, two, then three, four: it is 4.")
WELCOME = Line(heard="Thank you", content="You are welcome.")

LOOKING = Line(
    heard="Please look around",
    reasoning="Two looks at once.",
    content="Let me look.",
    calls=(
        ("exec", '{"command": "echo first-$((1+2))"}'),
        ("exec", '{"command": "echo second-$((2+2)); ls /nonexistent"}'),
    ),
)
LOOKED = Line(heard="first-3", content="Both are there.")
READING = Line(heard="That is not all, read word.txt", calls=(("read", '{"path": "word.txt"}'),))
READ = Line(heard="xylophone", content="The word is known now.")
FINE = Line(heard="Good, that is it", content="Fine.")

TRIED = Line(heard="Please try hard", content="I tried.")
CUT_OFF = Line(heard="What happened?", content="I was cut off.")

DELEGATING = Line(
    heard="Please delegate", calls=(("tool_call", '{"id": "sessions_spawn", "args": {"task": "Count the moons."}}'),)
)
UNDER_WAY = Line(heard='\\"childSessionKey\\"', content="It is under way.")
COUNTED = Line(heard="[Subagent Task]", content="There are two moons.")
REPORTED = Line(heard="A background task completed", content="Your helper counted two moons.")

STUDIED = Line(heard="Study this:", content="Studied.")
REMEMBERED = Line(heard="What was it about?", content="It was about words.")
STUDIED_MORE = Line(heard="Study this too:", content="That too.")
SUMMED_UP = Line(heard="<conversation>", content="## Goal\nStudy.")
FLUSHED = Line(heard="Pre-compaction memory flush", content=SILENT)
STILL_HERE = Line(heard="Are you still here?", content="I am.")

GREETED = Line(heard="Hello there", content="Hello.")
POLLED = Line(heard="Follow the heartbeat", content=SILENT)
BUSY = Line(heard="Use a tool now", calls=(("exec", '{"command": "echo tool-$((3+4))"}'),))
USED = Line(heard="tool-7", content="Used.")

# The first that fits is said: what OpenClaw writes itself quotes what people said.
LINES = (
    REPORTED, COUNTED, UNDER_WAY, SUMMED_UP, FLUSHED,
    FIVE, STEPS, WELCOME, LOOKING, LOOKED, READING, READ, FINE, TRIED, CUT_OFF, LONG_ANSWER, DELEGATING,
    STUDIED, REMEMBERED, STUDIED_MORE, STILL_HERE, GREETED, BUSY, USED, POLLED,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An exchange that must be there; without a line it failed for `reason`."""

    line: Line | None = None
    reason: str | None = None
    side: bool = False


def _all(*lines: Line) -> tuple[Asked, ...]:
    return tuple(Asked(line=line) for line in lines)


# Sessions by their id, or by what they are where OpenClaw draws the id.
SESSIONS = {
    "s1": _all(FIVE, STEPS, WELCOME),
    "s2": _all(LOOKING, LOOKED, READING, READ, FINE),
    "s3": (Asked(reason="engine_failed"), Asked(line=TRIED), Asked(reason="client_gone"), Asked(line=CUT_OFF)),
    "s4": _all(DELEGATING, UNDER_WAY, REPORTED, WELCOME),
    "s5": _all(STUDIED, REMEMBERED, STUDIED_MORE, STILL_HERE),
    "sub-agent": _all(COUNTED),
    "main": (Asked(line=GREETED), Asked(line=POLLED, side=True), *_all(BUSY, USED, WELCOME)),
    "memory flush": (Asked(line=FLUSHED, side=True),),
    "summary": (Asked(line=SUMMED_UP, side=True),),
}
# What must stand in each next state; an answer that is not here is pending when the story ends. None: of the answer
# that was stopped.
NEXT_STATES: dict[tuple[str, Line | None], tuple[str, ...]] = {
    ("s1", FIVE): ("Wrong, please show the steps.",),
    ("s1", STEPS): ("Thank you.",),
    ("s2", LOOKING): ("first-3", "second-4"),
    ("s2", LOOKED): ("That is not all, read word.txt",),
    ("s2", READING): ("xylophone",),
    ("s2", READ): ("Good, that is it.",),
    ("s3", TRIED): ("Please talk for long.",),
    ("s3", None): ("<turn_aborted>", "What happened?"),
    ("s4", DELEGATING): ('"status": "accepted"',),
    ("s4", UNDER_WAY): ("A background task completed",),
    ("s4", REPORTED): ("Thank you.",),
    ("s5", STUDIED): ("What was it about?",),
    ("s5", REMEMBERED): ("Study this too:",),
    ("s5", STUDIED_MORE): ("Are you still here?",),
    ("main", GREETED): ("Use a tool now.",),
    ("main", BUSY): ("tool-7",),
    ("main", USED): ("Thank you.",),
}
# None: where OpenClaw drops, joins or sums up messages, an answer's echo is found all the same.
ORPHANS: dict[tuple[str, Line | None], str] = {}
