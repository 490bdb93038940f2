"""SGLang's native HTTP dialect (0.5.23) as values: what a /generate body means and how an answer is written.

Pure. The client and our own servers share it, so each field of the wire is written and read in one place. Streams are
incremental (`--incremental-streaming-output`): a chunk carries only what is new.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from clawstream.events.exchanges import GREEDY_BELOW, Shaping, TokenBias
from clawstream.inference.engine import (
    Chunk,
    Finish,
    FinishKind,
    GenerateRequest,
    SamplingParams,
    WeightsSpan,
    read_version,
)

DEFAULT_MAX_NEW_TOKENS = 128
UNSHAPED = Shaping()
_GRAMMARS = ("json_schema", "regex", "ebnf")
_TOKEN_DIGITS = 9
_MESSAGE_CHARACTERS = 300
# Parameters that we do not implement, with the value under which they do nothing.
_NEUTRAL: Mapping[str, object] = {"n": 1, "structural_tag": "", "stop_regex": [], "custom_params": {}, "beam_width": 1}
# Fields that may have one value for each prompt of a batch.
_PER_PROMPT = (
    "rid", "extra_key", "lora_path", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
)  # fmt: skip
# Parameters that concern an answer's text; these servers send only token ids.
_IGNORED = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"})


class RequestRefused(ValueError):
    """A request this server will not run; `status` is the HTTP status that says so."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One prompt of a /generate body, with what its answer has to hold."""

    rid: str
    request: GenerateRequest
    return_logprob: bool = False
    logprob_start: int | None = None
    top_logprobs_num: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody:
    """A whole /generate body."""

    calls: tuple[Call, ...]
    stream: bool
    batch: bool


Logprob: TypeAlias = tuple[float | None, int, None]


@dataclass(slots=True, kw_only=True)
class TokenDelta:
    """What is new of one answer and was not sent to the client yet; it grows until it is sent."""

    token_ids: list[int]
    logprobs: list[float | None]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    input_logprobs: Sequence[Logprob] = ()
    top_logprobs: list[Sequence[Logprob]] | None = None
    input_top_logprobs: Sequence[Sequence[Logprob] | None] | None = None
    finish: dict[str, object] | None = None
    weight_versions: Sequence[WeightsSpan] = ()

    def absorb(self, newer: "TokenDelta") -> None:
        """Append the newer delta to this one."""
        self.token_ids += newer.token_ids
        self.logprobs += newer.logprobs
        if newer.top_logprobs is not None:
            self.top_logprobs = (self.top_logprobs or []) + newer.top_logprobs
        self.completion_tokens = newer.completion_tokens
        self.weight_version = newer.weight_version
        self.finish = newer.finish
        self.weight_versions = newer.weight_versions


def write_request(request: GenerateRequest, *, stream: bool) -> dict[str, object]:
    """The /generate body that asks for `request` with log-probs of every sampled token."""
    sampling = request.sampling
    params: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        **given(
            stop_token_ids=list(sampling.stop_token_ids) or None,
            stop=list(sampling.stop) or None,
            sampling_seed=sampling.sampling_seed,
            ignore_eos=sampling.ignore_eos or None,
        ),
        **_write_shaping(sampling.shaping or UNSHAPED),
    }
    return {
        "input_ids": request.unexpanded_ids,
        "sampling_params": params,
        "return_logprob": True,
        "stream": stream,
        **given(
            top_logprobs_num=request.top_logprobs_num or None,
            rid=request.rid,
            extra_key=request.extra_key,
            lora_path=request.lora_name,
            image_data=list(request.pictures) or None,
        ),
    }


def given(**values: object) -> dict[str, object]:
    """The values that are not None, by name."""
    return {name: value for name, value in values.items() if value is not None}


def _write_shaping(shaping: Shaping) -> dict[str, object]:
    written: dict[str, object] = {
        field.name: value
        for field in fields(Shaping)
        if (value := getattr(shaping, field.name)) != getattr(UNSHAPED, field.name)
    }
    if shaping.logit_bias:
        written["logit_bias"] = {str(biased.token_id): biased.bias for biased in shaping.logit_bias}
    return written


def read_body(body: object, *, new_rid: str) -> GenerateBody:
    """The calls in a parsed /generate body; raises RequestRefused naming the field that is wrong."""
    if not isinstance(body, dict):
        raise RequestRefused(f"the body is {_kind(body)}, expected a JSON object with input_ids")
    input_ids = body.get("input_ids")
    if not isinstance(input_ids, list) or not input_ids:
        raise RequestRefused(f"input_ids is {_kind(input_ids)}, expected a list of token ids or a list of such lists")
    batch = isinstance(input_ids[0], list)
    prompts = input_ids if batch else [input_ids]
    pictures = _pictures(body.get("image_data"), batch=batch)
    columns = {key: _column(body, key, len(prompts), batch=batch) for key in _PER_PROMPT}
    shared_rid = body.get("rid") if isinstance(body.get("rid"), str) else None
    calls = []
    for index, prompt in enumerate(prompts):
        row = {key: values[index] for key, values in columns.items()}
        if row["rid"] is None or (batch and shared_rid is not None):
            row["rid"] = f"{shared_rid or new_rid}_{index}" if batch else new_rid
        calls.append(_call(prompt, row, pictures))
    return GenerateBody(calls=tuple(calls), stream=body.get("stream") is True, batch=batch)


def _column(body: dict[str, Any], key: str, num_prompts: int, *, batch: bool) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        return [value] * num_prompts
    if not batch or len(value) != num_prompts:
        raise RequestRefused(f"{key} has {len(value)} entries for {num_prompts} prompts; give one for each")
    return value


def _pictures(found: object, *, batch: bool) -> tuple[str, ...]:
    if not found:
        return ()
    if batch or not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RequestRefused(f"image_data is {_kind(found)}, expected a list of data: URLs beside one prompt")
    return tuple(found)


def _call(prompt: object, row: Mapping[str, Any], pictures: tuple[str, ...]) -> Call:
    # bool is an int to Python, and [true] is not a prompt.
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise RequestRefused("input_ids holds something other than integers; send token ids")
    start = row["logprob_start_len"]
    start = None if start in (None, -1) else _integer("logprob_start_len", start, low=0)
    if start is not None and start > len(prompt):
        raise RequestRefused(f"logprob_start_len is {start}, higher than the number of input tokens {len(prompt)}")
    wanted = row["return_logprob"] is True
    return Call(
        rid=read_text("rid", row["rid"]),
        request=GenerateRequest(
            input_ids=prompt,
            sampling=read_sampling(row["sampling_params"]),
            extra_key=None if row["extra_key"] is None else read_text("extra_key", row["extra_key"]),
            rid=row["rid"],
            lora_name=None if row["lora_path"] is None else read_text("lora_path", row["lora_path"]),
            pictures=pictures,
        ),
        return_logprob=wanted,
        logprob_start=start if wanted else None,
        top_logprobs_num=_integer("top_logprobs_num", row["top_logprobs_num"] or 0, low=0) if wanted else 0,
    )


def read_sampling(params: object) -> SamplingParams:
    """The sampling parameters of a body; what is not implemented is refused unless it has no effect."""
    params = {} if params is None else params
    if not isinstance(params, dict):
        raise RequestRefused(f"sampling_params is {_kind(params)}, expected an object")
    rest = {key: value for key, value in params.items() if value is not None and key not in _IGNORED}
    max_new_tokens = _integer("max_new_tokens", rest.pop("max_new_tokens", DEFAULT_MAX_NEW_TOKENS), low=0)
    temperature = _number("temperature", rest.pop("temperature", 1.0), low=0.0, high=math.inf)
    top_p = _number("top_p", rest.pop("top_p", 1.0), low=0.0, high=1.0)
    if top_p == 0.0:
        raise RequestRefused("top_p is 0, expected a number in (0, 1]")
    top_k = rest.pop("top_k", -1)
    seed = rest.pop("sampling_seed", None)
    stop = rest.pop("stop", ())
    stop_ids = rest.pop("stop_token_ids", ())
    ignore_eos = rest.pop("ignore_eos", False) is True
    shaping = _read_shaping(rest, max_new_tokens)
    for key, value in rest.items():
        if key not in _NEUTRAL:
            raise RequestRefused(f"sampling_params has an unknown entry {key!r}")
        if value and value != _NEUTRAL[key]:
            raise RequestRefused(f"{key}={value!r} is not implemented by this engine; leave it out")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=None if top_k == -1 else _integer("top_k", top_k, low=1),
        stop_token_ids=tuple(_integer("stop_token_ids", token, low=0) for token in stop_ids),
        stop=(stop,) if isinstance(stop, str) else tuple(read_text("stop", one) for one in stop),
        sampling_seed=None if seed is None else _integer("sampling_seed", seed, low=-(2**63), high=2**63 - 1),
        ignore_eos=ignore_eos,
        shaping=shaping,
    )


def _read_shaping(rest: dict[str, Any], max_new_tokens: int) -> Shaping | None:
    """Take what shapes the distribution out of `rest`, within SGLang's limits; None where all of it is neutral."""
    repetition_penalty = _number("repetition_penalty", rest.pop("repetition_penalty", 1.0), low=0.0, high=2.0)
    if repetition_penalty == 0.0:
        raise RequestRefused("repetition_penalty is 0, expected a number in (0, 2]")
    grammars = {name: read_text(name, value) for name in _GRAMMARS if (value := rest.pop(name, None))}
    if len(grammars) > 1:
        raise RequestRefused(f"{' and '.join(grammars)} are both set, expected one grammar")
    biases = rest.pop("logit_bias", {})
    if not isinstance(biases, dict) or not all(token.isdecimal() and len(token) <= _TOKEN_DIGITS for token in biases):
        raise RequestRefused("logit_bias is not an object, expected token ids with the bias of each")
    shaping = Shaping(
        frequency_penalty=_number("frequency_penalty", rest.pop("frequency_penalty", 0.0), low=-2.0, high=2.0),
        presence_penalty=_number("presence_penalty", rest.pop("presence_penalty", 0.0), low=-2.0, high=2.0),
        repetition_penalty=repetition_penalty,
        min_p=_number("min_p", rest.pop("min_p", 0.0), low=0.0, high=1.0),
        min_new_tokens=_integer("min_new_tokens", rest.pop("min_new_tokens", 0), low=0, high=max_new_tokens),
        logit_bias=tuple(
            TokenBias(token_id=int(token), bias=_number("logit_bias", bias, low=-math.inf, high=math.inf))
            for token, bias in biases.items()
        ),
        **grammars,
    )
    return None if shaping == UNSHAPED else shaping


def refuse_pictures(call: Call) -> None:
    """Raises RequestRefused where pictures belong to the prompt: the engine reads token ids alone."""
    if call.request.pictures:
        raise RequestRefused("image_data: this engine sees no pictures; ask one whose model does, or send text alone")


def check_fits(call: Call, *, context_length_tokens: int, vocab_size: int) -> None:
    """Raises RequestRefused where the prompt, or prompt and answer together, do not fit the model."""
    num_prompt, num_new = len(call.request.input_ids), call.request.sampling.max_new_tokens
    if num_prompt >= context_length_tokens:
        raise RequestRefused(
            f"The input ({num_prompt} tokens) is longer than the model's context length "
            f"({context_length_tokens} tokens)."
        )
    if num_prompt + num_new > context_length_tokens:
        raise RequestRefused(
            f"Requested token count exceeds the model's maximum context length of {context_length_tokens} tokens: "
            f"{num_prompt} tokens of input and {num_new} of completion. Shorten the input or ask for fewer tokens."
        )
    if min(call.request.input_ids) < 0 or max(call.request.input_ids) >= vocab_size:
        raise RequestRefused(f"input_ids holds an id outside [0, {vocab_size - 1}], the model's vocabulary")
    shaping = call.request.sampling.shaping
    if shaping is not None and any(biased.token_id >= vocab_size for biased in shaping.logit_bias):
        raise RequestRefused(f"logit_bias names an id outside [0, {vocab_size - 1}], the model's vocabulary")


def write_delta(call: Call, delta: TokenDelta) -> dict[str, object]:
    """One element of an answer: a streamed chunk, or the whole of it where nothing is streamed."""
    meta: dict[str, object] = {
        "id": call.rid,
        "finish_reason": delta.finish,
        "prompt_tokens": delta.prompt_tokens,
        "weight_version": delta.weight_version,
        "completion_tokens": delta.completion_tokens,
        "cached_tokens": delta.cached_tokens,
    }
    if call.return_logprob:
        meta["input_token_logprobs"] = delta.input_logprobs
        meta["output_token_logprobs"] = [
            (value, token, None) for value, token in zip(delta.logprobs, delta.token_ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = delta.completion_tokens
        if call.top_logprobs_num:
            meta["input_top_logprobs"] = delta.input_top_logprobs or []
            meta["output_top_logprobs"] = delta.top_logprobs or []
    if delta.finish is not None:
        meta["weight_versions"] = write_spans(delta.weight_versions, delta.weight_version)
    return {"output_ids": delta.token_ids, "meta_info": meta}


def write_spans(spans: Sequence[WeightsSpan], current: str) -> list[dict[str, object]]:
    """Spans as [start, end) of the answer; an answer without tokens names the weights that would have sampled them."""
    written, start = [], 0
    for span in spans or (WeightsSpan(current, 0),):
        written.append({"version": span.version, "start": start, "end": start + span.num_tokens})
        start += span.num_tokens
    return written


def read_chunk(element: Mapping[str, Any]) -> Chunk:
    """One element of a streamed answer; raises KeyError, TypeError or ValueError where it is not of this dialect."""
    meta: Mapping[str, Any] = {**element["meta_info"]}  # a TypeError where it is no object
    token_ids = tuple(element["output_ids"])
    pairs = meta.get("output_token_logprobs") or ()
    finish = _read_finish(meta.get("finish_reason"))
    if finish is not None and finish.kind is FinishKind.ABORT and len(pairs) != len(token_ids):
        token_ids, pairs = (), ()  # SGLang repeats its last token when it aborts a request that was waiting
    if pairs and len(pairs) != len(token_ids):
        counts = f"{len(pairs)} log-probs for {len(token_ids)} new tokens"
        raise ValueError(f"{counts}; start the engine with --incremental-streaming-output")
    sampled = meta.get("completion_tokens")
    if sampled is not None and type(sampled) is not int:
        raise ValueError(f"completion_tokens is {str(sampled)[:100]}, expected an integer")
    top = meta.get("output_top_logprobs") or ()
    top = top if len(top) == len(token_ids) else ()
    return Chunk(
        token_ids,
        tuple([pair[0] for pair in pairs]) if pairs else (None,) * len(token_ids),
        meta.get("prompt_tokens"),
        meta.get("cached_tokens"),
        meta.get("weight_version"),
        finish,
        () if finish is None else read_spans(meta.get("weight_versions") or ()),
        sampled,
        tuple(tuple((float(entry[0]), int(entry[1])) for entry in likeliest or ()) for likeliest in top),
    )


def read_spans(written: Iterable[Mapping[str, Any]]) -> tuple[WeightsSpan, ...]:
    """The spans as `write_spans` writes them; vLLM writes them so too."""
    spans, begin = [], 0
    for span in written:
        version, start, end = read_version(span["version"]), span["start"], span["end"]
        if version is None or start != begin or type(end) is not int or end < begin:
            raise ValueError(f"weight_versions hold {str(span)[:100]}, expected a version from token {begin} on")
        spans.append(WeightsSpan(version, end - begin))
        begin = end
    return tuple(spans)


def _read_finish(reason: Mapping[str, Any] | None) -> Finish | None:
    if reason is None:
        return None
    kind, message = FinishKind(reason["type"]), reason.get("message")
    message = None if message is None else str(message)[:_MESSAGE_CHARACTERS]
    return Finish(kind=kind, matched=reason.get("matched"), message=message)


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    if type(value) is not int or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestRefused(f"{name} is {value!r}, expected an integer {limits}")
    return value


def _number(name: str, value: object, *, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or math.isinf(value):
        raise RequestRefused(f"{name} is {value!r}, expected a finite number in [{low}, {high}]")
    return float(value)


def read_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RequestRefused(f"{name} is {value!r}, expected a string that is not empty")
    return value


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    return f"{'a' if value else 'an empty'} {type(value).__name__}"
