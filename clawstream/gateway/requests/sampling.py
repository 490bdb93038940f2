"""An answer's sampling, from the client's request, the gateway's defaults and the room in the context. Pure."""

from dataclasses import replace

from clawstream.events import Sampling, Shaping
from clawstream.events.exchanges import GREEDY_BELOW
from clawstream.gateway.requests.fields import BadRequest, TooLong
from clawstream.gateway.requests.shaping import MAX_GRAMMAR_BYTES
from clawstream.gateway.requests.wire import ReplyOptions


def sampling_of(
    asked: ReplyOptions,
    *,
    grammar: str | None,
    num_prompt_tokens: int,
    context_length_tokens: int,
    default_max_tokens: int | None,
    default_temperature: float,
) -> Sampling:
    """Return the answer's sampling, in which `grammar` replaces the requested schema. Raises BadRequest."""
    room = context_length_tokens - num_prompt_tokens
    if room < 1:
        raise TooLong(
            f"the messages are {num_prompt_tokens} tokens long", context_length_tokens, prompt_tokens=num_prompt_tokens
        )
    shaping = asked.shaping
    if grammar is not None:
        if (num_bytes := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
            raise BadRequest(
                f"The tools, and a schema that the answer is to follow, make a grammar of {num_bytes} bytes; expected "
                f"at most {MAX_GRAMMAR_BYTES}. Offer fewer tools, or name one of them in tool_choice.",
                param="tool_choice",
            )
        shaping = replace(shaping or Shaping(), json_schema=None, ebnf=grammar)
    max_tokens = min(asked.max_tokens or default_max_tokens or room, room)
    if shaping is not None and shaping.min_new_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {shaping.min_new_tokens}; the answer has at most {max_tokens} tokens. "
            "Ask for fewer, or shorten the messages.",
            param="min_tokens",
        )
    return Sampling(
        temperature=default_temperature if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k,
        max_tokens=max_tokens,
        seed=asked.seed,
        stop=asked.stop,
        shaping=shaping,
    )


def of_the_policy(sampling: Sampling, *, default_temperature: float) -> Sampling:
    """Return the closest sampling from the policy's whole distribution.

    Raises BadRequest for a grammar, since without it the client could not read the answer.
    """
    if sampling.of_the_policy:
        return sampling
    if sampling.shaping is not None and sampling.shaping.has_grammar:
        raise BadRequest(
            "The answer is to follow a grammar (response_format, json_schema, regex, ebnf, or a tool_choice that has "
            "a tool called), and this gateway samples main turns from the policy's whole distribution "
            "(samples.off_distribution = gateway_override); nothing was generated. Leave the grammar out, or ask in a "
            "side turn (X-Turn-Type: side).",
            code="unsupported_value",
        )
    warm = (value for value in (sampling.temperature, default_temperature, 1.0) if value >= GREEDY_BELOW)
    return replace(sampling, temperature=next(warm), top_p=1.0, top_k=None, shaping=None)
