"""Who wrote what stands in a user's message: the person, the surroundings, or the client for itself. Pure.

The one rule: only what the person wrote is the person's. What a client reports (a helper's result, an interruption) is
the environment's; what it writes for the model alone (an instruction to go on, a frame around words) is nobody's, and
gone from its next history. All of it is what OpenClaw 2026.9.6 writes, by the constants of its source.
"""

import re
from enum import StrEnum
from typing import NamedTuple

# Around a person's words: when they came, and after the first ones where it runs.
_TIME = re.compile(r"\A\s*\[\w{3} \d{4}-\d{2}-\d{2} \d{2}:\d{2}[^\]]*\]\s*")
_RUNTIME = re.compile(r"(?:\A|\n)Runtime: agent=[^\n]*\s*\Z")
_CONTEXT = re.compile(r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*?<<<END_OPENCLAW_INTERNAL_CONTEXT>>>", re.DOTALL)
_QUEUED = re.compile(
    r"^\[Queued user message from a previous active turn; preserved as context only\. Continue with the active prompt "
    r"below\.\]$|^\[Queued messages while agent was busy\]$|^---\nQueued #\d+[^\n]*$",
    re.MULTILINE,
)
_BLANK = re.compile(r"\n{3,}")
# Prompts that it writes itself, in the user's place, and what its history has for them afterwards.
_HOUSEKEEPING = re.compile(
    r"\A(?:"
    r"Follow the heartbeat monitor scratch context"
    r"|Read HEARTBEAT\.md if it exists"
    r"|\[OpenClaw (?:heartbeat poll|cron wake|exec completion|session event)\]"
    r"|A scheduled (?:reminder|cron event) (?:has been|was) triggered"
    r"|An async command (?:completion event was triggered|you ran earlier (?:has )?completed)"
    r"|Pre-compaction memory flush\."
    r"|\[cron:[^\]]+\]"
    r")"
)
# What it tells the model to do in a turn that goes on; the next history does not hold it.
_INSTRUCTION = re.compile(
    r"\A(?:"
    r"Continue the current task from the existing transcript, preserving completed work\."
    r"|The previous attempt did not produce a user-visible answer\."
    r"|The previous attempt compacted the conversation context before producing a final user-visible answer\."
    r"|The previous assistant turn recorded reasoning but did not produce a user-visible answer\."
    r"|The previous assistant turn completed its tool calls but did not produce a user-visible answer\."
    r"|The plugin runtime has been refreshed\. Continue the current task from the transcript"
    r"|\[System\] (?:Your previous (?:turn was interrupted by a gateway restart|reply was not delivered)"
    r"|Continue from the recovered transcript)"
    r")"
)
# What a person tells the client and no model; more words behind it than a command takes are for the model.
_COMMAND = re.compile(
    r"\A/(?:new|reset|status|stop|compact(?: [^\n]*)?|queue(?: \S+){0,4}"
    r"|(?:context|model|think|usage|verbose)(?: \S+)?)\Z"
)
# What it reports of the world; the last is Claude Code's, those before it are Codex's.
_REPORT = re.compile(
    r"\A(?:"
    r"<turn_aborted>"
    r"|A background task completed\."
    r"|\[Internal task completion event\]"
    r"|\[Inter-session message\]"
    r"|\[Subagent Context\] (?:Your prior run ended while waiting|Every subagent spawned from this session)"
    r"|\[OpenClaw room event\]"
    r"|The conversation history before this point was compacted into the following summary:"
    r"|The following is a summary of a branch that this conversation came back from:"
    r"|<environment_context>"
    r"|# AGENTS\.md instructions"
    r"|<user_shell_command>"
    r"|Another language model started to solve this problem and produced a summary of its thinking process\."
    r"|\[Request interrupted by user(?: for tool use)?\]"
    r")"
)


class Author(StrEnum):
    """Whose words they are."""

    PERSON = "person"
    ENVIRONMENT = "environment"
    CLIENT = "client"  # for the model alone, or to the client alone


class Written(NamedTuple):
    """A piece of a user's message, without the frames that a client puts around it."""

    author: Author
    text: str


def written(text: str) -> Written | None:
    """Return who wrote a part of a user's message, and what; None where nothing is left of it but frames."""
    said = _TIME.sub("", _RUNTIME.sub("", text)).strip()
    if any(own.match(said) for own in (_HOUSEKEEPING, _INSTRUCTION, _COMMAND)):
        return Written(Author.CLIENT, said)
    if _REPORT.match(said):
        return Written(Author.ENVIRONMENT, said)
    said = _BLANK.sub("\n\n", _QUEUED.sub("", _CONTEXT.sub("", said))).strip()
    # A report may stand behind a block of context.
    return Written(Author.ENVIRONMENT if _REPORT.match(said) else Author.PERSON, said) if said else None


def is_frame(text: str) -> bool:
    """Return whether the part is nothing but the line that says where the client runs."""
    return not _RUNTIME.sub("", text)


def is_housekeeping_part(text: str) -> bool:
    """Return whether a client asks this for itself: a heartbeat, a memory flush, a reminder."""
    return bool(_HOUSEKEEPING.match(_TIME.sub("", text)))
