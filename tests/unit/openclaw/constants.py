"""What OpenClaw 2026.9.6 writes in the user's place, as its source has it."""

INSTRUCTIONS = (
    (
        "Continue the current task from the existing transcript, preserving completed work. If an action was "
        "interrupted, inspect its state before deciding whether to retry it. Do not restart the task or "
        "repeat completed actions."
    ),
    (
        "The previous attempt did not produce a user-visible answer. Continue from the current state and "
        "produce the visible answer now. Do not restart from scratch."
    ),
    (
        "The previous assistant turn recorded reasoning but did not produce a user-visible answer. Continue "
        "from that partial turn and produce the visible answer now. Do not restate the reasoning or restart "
        "from scratch."
    ),
    (
        "The previous attempt compacted the conversation context before producing a final user-visible "
        "answer. Continue from the compacted transcript and produce the final answer now. Do not restart from "
        "scratch, do not repeat completed work, and do not rerun tools unless the transcript clearly lacks "
        "required evidence."
    ),
    (
        "The previous assistant turn completed its tool calls but did not produce a user-visible answer. "
        "Continue from the current transcript and produce the final user-visible answer now. Do not repeat "
        "completed tool calls or restart from scratch."
    ),
    ("The plugin runtime has been refreshed. Continue the current task from the transcript using the updated tools."),
)
SYSTEM_TURNS = (
    ("Your previous turn was interrupted by a gateway restart while OpenClaw was waiting on tool/model work."),
    ("Your previous reply was not delivered to the conversation because you did not call message(action=send)."),
    "Continue from the recovered transcript and finish the interrupted work.",
)  # behind "[System] "
# How its prompts to itself begin, and what its history has for them.
HOUSEKEEPING = (
    "Follow the heartbeat monitor scratch context",
    "[OpenClaw heartbeat poll]",
    "[OpenClaw cron wake]",
    "[OpenClaw exec completion]",
    "[OpenClaw session event]",
    "A scheduled reminder has been triggered",
    "A scheduled cron event was triggered",
    "An async command completion event was triggered",
    "An async command you ran earlier has completed",
    "Pre-compaction memory flush.",
    "[cron:",
)
REPORTS = (
    ("<turn_aborted>\nThe previous turn was interrupted. Any running background processes may still be active."),
    "A background task completed. Use this result to reply to the user in your normal assistant voice.",
    (
        "A background task completed. Keep internal details private and use its result to reply in your "
        "normal assistant voice."
    ),
    "[Internal task completion event]",
    "[Inter-session message]",
    "[Subagent Context] Your prior run ended while waiting for descendant subagent completions.",
    "[Subagent Context] Every subagent spawned from this session has now settled",
    "[OpenClaw room event]",
    "The conversation history before this point was compacted into the following summary:",
    "The following is a summary of a branch that this conversation came back from:",
)
QUEUED = (
    "[Queued user message from a previous active turn; preserved as context only. Continue with the "
    "active prompt below.]"
)
QUEUED_MANY = "[Queued messages while agent was busy]"
