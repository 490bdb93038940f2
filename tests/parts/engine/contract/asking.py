"""Short ways to ask an engine and to put a streamed answer together."""

from collections.abc import Sequence
from dataclasses import dataclass

from clawstream.inference.engine import Chunk, Finish, GenerateRequest, SamplingParams, WeightsSpan
from clawstream.inference.http_engine import HttpEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A whole answer, with the number of chunks that brought it."""

    token_ids: tuple[int, ...]
    logprobs_nats: tuple[float, ...]
    finish: Finish
    versions: tuple[WeightsSpan, ...]
    num_chunks: int
    cached_tokens: int | None
    prompt_tokens: int | None


def asking(
    input_ids: Sequence[int],
    max_new_tokens: int = 8,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    stop_token_ids: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    top_p: float = 1.0,
    top_k: int | None = None,
    extra_key: str | None = None,
    rid: str | None = None,
    lora_name: str | None = None,
) -> GenerateRequest:
    """A request that no end-of-text token cuts short."""
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=stop_token_ids,
        stop=stop,
        sampling_seed=seed,
        ignore_eos=not stop_token_ids,
    )
    return GenerateRequest(input_ids=input_ids, sampling=sampling, extra_key=extra_key, rid=rid, lora_name=lora_name)


async def answer(engine: HttpEngine, request: GenerateRequest) -> Answered:
    """The whole answer to a request."""
    return whole([chunk async for chunk in engine.generate(request)])


def whole(chunks: Sequence[Chunk]) -> Answered:
    """The answer that these chunks carry; only the last one may have a finish."""
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert last.finish is not None
    logprobs = tuple(value for chunk in chunks for value in chunk.logprobs_nats)
    return Answered(
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs_nats=tuple(value for value in logprobs if value is not None),
        finish=last.finish,
        versions=last.weight_versions,
        num_chunks=len(chunks),
        cached_tokens=last.cached_tokens,
        prompt_tokens=last.prompt_tokens,
    )
