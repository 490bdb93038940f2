"""A real OpenClaw talks to a real gateway; what is in Postgres afterwards is what took place, no more and no less."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from clawstream.conversation.messages import is_ephemeral, role_of, text_of
from tests.fakes.scripted_engine import token_logprob
from tests.system.openclaw import dialogue
from tests.system.openclaw.conftest import Played
from tests.system.openclaw.policy import Line
from tests.system.openclaw.rows import Exchange, exchanges_in, num_common, turns_in

pytestmark = [pytest.mark.openclaw, pytest.mark.timeout(1200)]
PAGE_TOKENS = 64


@pytest.fixture(scope="module")
def exchanges(played: Played) -> list[Exchange]:
    return exchanges_in(played.database_url)


def sessions(exchanges: list[Exchange]) -> dict[str, list[Exchange]]:
    """Exchanges by session, each under the name that the story has for it."""
    found: defaultdict[str, list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        found[exchange.session_id].append(exchange)
    return {name(session_id, part): part for session_id, part in found.items()}


def name(session_id: str, part: list[Exchange]) -> str:
    first = "\n".join(map(text_of, part[0].messages))
    if session_id in dialogue.SESSIONS:
        return session_id
    if session_id.startswith("internal-session-effects-"):
        return "memory flush"
    if "<conversation>" in first:
        return "summary"
    return "sub-agent" if "[Subagent Task]" in first else "main"


def said(exchange: Exchange) -> dialogue.Asked:
    """The exchange as the story tells it."""
    if exchange.reason is not None or exchange.answer is None:
        return dialogue.Asked(reason=exchange.reason)
    calls = exchange.answer.get("tool_calls") or ()
    answer = (
        exchange.answer.get("content") or "",
        exchange.answer.get("reasoning_content") or "",
        tuple((call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls),
    )
    line = next((line for line in dialogue.LINES if answer == meant(line) and is_heard(line, exchange)), None)
    return dialogue.Asked(line=line, side=exchange.turn_type == "side")


def meant(line: Line) -> tuple[str, str, tuple[tuple[str, object], ...]]:
    return line.content, line.reasoning, tuple((called, json.loads(arguments)) for called, arguments in line.calls)


def is_heard(line: Line, exchange: Exchange) -> bool:
    return any(line.heard in text_of(message) for message in exchange.messages)


def test_the_exchanges_are_those_that_took_place(played: Played, exchanges: list[Exchange]) -> None:
    assert played.script.unexpected == []
    found = {key: tuple(map(said, part)) for key, part in sessions(exchanges).items()}
    assert found == dialogue.SESSIONS
    assert {exchange.client for exchange in exchanges if exchange.turn_type == "main"} == {"openclaw"}


def test_people_see_what_the_policy_said(played: Played) -> None:
    for asked, line in (("What is 2+2?", dialogue.FIVE), ("Please look around.", dialogue.LOOKED)):
        assert line.content in played.replies[asked]


def test_the_turns_and_their_next_states_are_those_that_took_place(played: Played, exchanges: list[Exchange]) -> None:
    turns = turns_in(played.database_url, exchanges)
    of = {one.exchange_id: (key, said(one).line) for key, part in sessions(exchanges).items() for one in part}
    paired = {of[turn.turn_id]: tuple(map(text_of, turn.next_state)) for turn in turns.values() if turn.reason is None}
    assert paired.keys() == dialogue.NEXT_STATES.keys()
    for turn, words in dialogue.NEXT_STATES.items():
        assert len(paired[turn]) == len(words)
        assert all(word in state for word, state in zip(words, paired[turn], strict=True)), turn
    assert {of[turn.turn_id]: turn.reason for turn in turns.values() if turn.reason} == dialogue.ORPHANS


def test_tokens_and_log_probs_are_those_of_the_engine(played: Played, exchanges: list[Exchange]) -> None:
    calls = {call.rid: call for call in played.engine.calls}
    assert calls.keys() == {exchange.exchange_id for exchange in exchanges}
    for exchange in exchanges:
        prompt = tuple(calls[exchange.exchange_id].request.input_ids)
        assert exchange.token_ids == prompt
        line = said(exchange).line
        if line is not None:
            assert exchange.output_ids == played.script.ids(line.sampled())
            first = len(prompt)
            assert exchange.output_logprobs == tuple(
                token_logprob(first + position, token) for position, token in enumerate(exchange.output_ids)
            )


def test_after_a_first_turn_the_engine_prefills_what_is_new(played: Played, exchanges: list[Exchange]) -> None:
    """A client that rewrites its system prompt or drops its history starts over; nobody can keep that prefix."""
    counts = []
    for key, part in sessions(exchanges).items():
        seen: list[tuple[int, ...]] = []
        for before, now in pairwise(part):
            seen.append((*before.token_ids, *before.output_ids))
            if before.reason is not None or not goes_on(before, now):
                continue
            cached = max(num_common(now.token_ids, one) for one in seen) // PAGE_TOKENS * PAGE_TOKENS
            prefilled, new = len(now.token_ids) - cached, num_new(played, before, now)
            counts.append((key, len(now.token_ids), prefilled, len(before.output_ids), new, now.num_spliced))
            assert prefilled <= len(before.output_ids) + new + PAGE_TOKENS, counts[-1]
    print("\nsession, prompt, prefilled, previous answer, new messages and block (tokens), spliced answers")
    print("\n".join(map(str, counts)))
    assert len(counts) >= 9


def goes_on(before: Exchange, now: Exchange) -> bool:
    """Whether the request is the one before and more."""
    kept = [message for message in before.messages if not is_ephemeral(message)]
    return list(now.messages[: len(kept)]) == kept


def num_new(played: Played, before: Exchange, now: Exchange) -> int:
    """The tokens of the messages that follow the answer, the client's block among them, and of what asks for more.

    The markup around the answer is new too: the block that stood before it is gone, and all moves up.
    """
    num_kept = sum(not is_ephemeral(message) for message in before.messages)
    texts = [f"<|im_start|>{role_of(one)}\n{text_of(one)}<|im_end|>\n" for one in now.messages[num_kept + 1 :]]
    ask = "<|im_start|>assistant\n"
    return len(played.script.renderer.encode(f"{ask}<|im_end|>\n" + "".join(texts) + ask))
