"""vLLM's token-in, token-out HTTP dialect (0.32) as values: what is asked of /inference/v1/generate, and its answers.

Pure. An answer's last event but one names the weights that sampled each token; the last one counts the prompt's tokens,
so the chunk with the finish is held until it came.

With --logprobs-mode processed_logprobs vLLM's log-probs are those at the sampling temperature, after penalties, as ours
are. But they are also after top-p, top-k and min-p, and ours are before. Where one of these is asked for, each log-prob
is None: vLLM can't tell it. `probe` finds out whether a server has that mode, as its answers don't name it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from clawstream.events.exchanges import GREEDY_BELOW, Shaping
from clawstream.inference.dialect import UNSHAPED, given, read_spans
from clawstream.inference.engine import Chunk, Finish, FinishKind, GenerateRequest, SamplingParams

GENERATE = "/inference/v1/generate"
_LEAST_TEMPERATURE = 0.01  # vLLM samples at this one where a lower one is asked for
_NEVER_NATS = -9000.0  # it writes -9999 for a token that can't be drawn
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def tells_logprobs(sampling: SamplingParams) -> bool:
    """Whether vLLM's log-probs of an answer that is sampled so are those that we record."""
    if sampling.temperature < GREEDY_BELOW:
        return True
    whole = sampling.top_p >= 1 and sampling.top_k is None and (sampling.shaping or UNSHAPED).min_p == 0
    return whole and sampling.temperature >= _LEAST_TEMPERATURE


def write_generate(request: GenerateRequest) -> dict[str, object]:
    """The body that asks for `request` as a stream, with log-probs of every sampled token."""
    sampling = request.sampling
    params: dict[str, object] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0 if sampling.top_k is None else sampling.top_k,
        "logprobs": request.top_logprobs_num,
        **given(
            stop_token_ids=list(sampling.stop_token_ids) or None,
            stop=list(sampling.stop) or None,
            skip_special_tokens=False if sampling.stop else None,  # a stop string is looked for in the whole text
            seed=sampling.sampling_seed,
            ignore_eos=sampling.ignore_eos or None,
        ),
        **_write_shaping(sampling.shaping or UNSHAPED),
    }
    return {
        "token_ids": list(request.input_ids),
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
        **given(request_id=request.rid, cache_salt=request.extra_key, model=request.lora_name),
    }


def _write_shaping(shaping: Shaping) -> dict[str, object]:
    grammar = {theirs: value for ours, theirs in _GRAMMARS.items() if (value := getattr(shaping, ours)) is not None}
    return given(
        frequency_penalty=shaping.frequency_penalty or None,
        presence_penalty=shaping.presence_penalty or None,
        repetition_penalty=None if shaping.repetition_penalty == 1.0 else shaping.repetition_penalty,
        min_p=shaping.min_p or None,
        min_tokens=shaping.min_new_tokens or None,
        logit_bias={str(biased.token_id): biased.bias for biased in shaping.logit_bias} or None,
        structured_outputs=grammar or None,
    )


class Reading:
    """Reads the events of one streamed answer in their order."""

    def __init__(self, request: GenerateRequest) -> None:
        self._tells = tells_logprobs(request.sampling)
        self._num_likeliest = request.top_logprobs_num if self._tells else 0
        self._last: Chunk | None = None  # the chunk with the finish

    def take(self, element: Mapping[str, Any]) -> Chunk | None:
        """Return the chunk that is complete with this event; raises LookupError, TypeError or ValueError where the
        event is not of this dialect.
        """
        choices = element["choices"]
        if choices:
            if self._last is not None:
                raise ValueError("more tokens after the finish")
            chunk = self._chunk(choices[0])
            self._last = None if chunk.finish is None else chunk
            return chunk if chunk.finish is None else None
        if self._last is None:
            raise ValueError("an event without a choice before the finish")
        usage = element["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return self._last._replace(prompt_tokens=usage["prompt_tokens"], cached_tokens=details.get("cached_tokens"))

    def _chunk(self, choice: Mapping[str, Any]) -> Chunk:
        token_ids = tuple(choice["token_ids"] or ())
        told = ((choice.get("logprobs") or {}).get("content") or ()) if token_ids else ()
        if [entry["token_id"] for entry in told] != list(token_ids):
            raise ValueError(f"log-probs of {len(told)} tokens for {len(token_ids)} new ones, or of others")
        finish = _finish(choice, token_ids)
        return Chunk(
            token_ids,
            tuple([entry["logprob"] if self._tells else None for entry in told]),
            finish=finish,
            weight_versions=() if finish is None else read_spans(choice.get("weight_versions") or ()),
            top_logprobs=tuple([_likeliest(entry, self._num_likeliest) for entry in told if self._num_likeliest]),
        )


def _likeliest(entry: Mapping[str, Any], most: int) -> tuple[tuple[float, int], ...]:
    """The likeliest tokens at a place, in their order; vLLM puts the sampled one before them."""
    ranked = sorted(entry["top_logprobs"], key=lambda one: int(one["rank"]))[:most]
    return tuple((float(one["logprob"]), int(one["token_id"])) for one in ranked)


def _finish(choice: Mapping[str, Any], token_ids: Sequence[int]) -> Finish | None:
    reason, matched = choice.get("finish_reason"), choice.get("stop_reason")
    if reason is None:
        return None
    kind = FinishKind(reason)
    if kind is FinishKind.STOP and matched is None and token_ids:
        matched = token_ids[-1]  # the model's own end of text, which vLLM does not name
    return Finish(kind=kind, matched=matched)


def write_score(input_ids: Sequence[int], *, extra_key: str | None, lora_name: str | None) -> dict[str, object]:
    """The body that asks for the log-probs of a prompt's tokens; one token has to be sampled after it."""
    return {
        "token_ids": list(input_ids),
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
        "stream": False,
        **given(cache_salt=extra_key, model=lora_name),
    }


def read_score(answer: Mapping[str, Any], input_ids: Sequence[int], start: int) -> list[tuple[int, float | None]]:
    """The tokens from `start` on with their log-probs; None for one that the answer does not name at its place."""
    told = answer["prompt_logprobs"]
    if len(told) != len(input_ids):
        raise ValueError(f"log-probs of {len(told)} tokens for {len(input_ids)}")
    places = zip(input_ids[start:], told[start:], strict=True)
    return [(token, place[str(token)]["logprob"] if place and str(token) in place else None) for token, place in places]


def probe() -> dict[str, object]:
    """The body of a request whose answer tells the log-probs' mode: one token of one that may be drawn."""
    params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 2}
    return {"token_ids": [0], "sampling_params": params, "stream": False}


def has_mode(answer: Mapping[str, Any]) -> bool:
    """Whether the answer to `probe` has log-probs after top-k: 0 for the one token, and no other can be drawn."""
    [place] = answer["choices"][0]["logprobs"]["content"]
    others = [one["logprob"] for one in place["top_logprobs"] if one["token_id"] != place["token_id"]]
    return place["logprob"] == 0.0 and bool(others) and all(value <= _NEVER_NATS for value in others)
