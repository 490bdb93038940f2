"""The client of SGLang: its native HTTP (0.5.23)."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from clawstream.errors import TryLater
from clawstream.inference.dialect import read_chunk, write_request
from clawstream.inference.engine import (
    Chunk,
    EngineRefused,
    FinishKind,
    GenerateRequest,
    SamplingParams,
    ServerInfo,
    read_version,
)
from clawstream.inference.http_borders import shown
from clawstream.inference.http_engine import HttpEngine, Scored


class SglangEngine(HttpEngine):
    """One engine that speaks SGLang's dialect: SGLang, or one of ours."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks as they arrive, the last one with a finish; closing the iterator closes the connection."""
        return self._sampled(request, "/generate", write_request(request, stream=True), self._read)

    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs (temperature 1) of input_ids[start:]; one token more is asked for, as the first one gets none."""
        self._refuse_start(input_ids, start)
        request = GenerateRequest(
            input_ids=input_ids,
            sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
            extra_key=extra_key,
            lora_name=lora_name,
        )
        body = write_request(request, stream=False) | {"logprob_start_len": start - 1}
        found = await self._scored(
            "/generate", body, _read_scores, num_tokens=len(input_ids), field="input_token_logprobs"
        )
        expected, largest = input_ids[start:], max(input_ids)
        # SGLang writes 0 in place of the vocabulary's last id. If the request has that id, it is its largest.
        named = [
            (largest if token == 0 and wanted == largest else token, value)
            for (token, value), wanted in zip_longest(found, expected[: len(found)])
        ]
        return self._right(named, expected, start)

    async def pause(self, *, retract: bool = False) -> None:
        """Sample no token until `resume`; running requests keep their KV cache, or with `retract` lose it."""
        await self._post("/pause_generation", {"mode": "retract" if retract else "in_place"})

    async def resume(self) -> None:
        """Go on sampling where `pause` stopped."""
        await self._post("/continue_generation", {})

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        """Serve the weights at `path` as `version`. Pause first, or SGLang waits for every running request.

        `flush_cache` also empties the prefix cache; it needs a pause with `retract`.
        """
        body = {"model_path": path, "weight_version": version, "abort_all_requests": False, "flush_cache": flush_cache}
        await self._post("/update_weights_from_disk", body, self._load_timeout)

    async def server_info(self) -> ServerInfo:
        """Context length from /v1/models; model and weight version from /model_info, which a swap changes."""
        cards, model = await self._cards(), await self._get("/model_info")
        try:
            path, longest = model["model_path"], cards[0]["max_model_len"]
            version = read_version(model.get("weight_version"))
        except (KeyError, IndexError, ValueError) as error:
            raise TryLater(f"engine {self._url}: /v1/models or /model_info lacks a field: {error!r}") from error
        return self._info(path, longest, version)

    async def weight_version(self) -> str | None:
        """The name of the weights that it serves; None where it gives none."""
        model = await self._get("/model_info")
        try:
            return read_version(model.get("weight_version"))
        except ValueError as error:
            raise TryLater(f"engine {self._url}: /model_info: {error}") from error

    async def quantization(self) -> str | None:
        """What --quantization says; None: it was not given, or the server has no /server_info."""
        try:
            named = (await self._get("/server_info")).get("quantization")
        except EngineRefused:
            return None
        return named if isinstance(named, str) else None

    async def name_weights(self, version: str) -> None:
        """Have it call the weights that it serves by this name; nothing is loaded."""
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _read(self, event: bytes) -> Chunk:
        element = self._element(event, "/generate")
        try:
            chunk = read_chunk(element)
        except (LookupError, TypeError, ValueError) as error:
            raise TryLater(f"engine {self._url}: a chunk that is not SGLang's dialect: {shown(repr(error))}") from error
        if chunk.finish is not None and chunk.finish.kind is FinishKind.ABORT:
            status = element["meta_info"]["finish_reason"].get("status_code")
            if type(status) is int:
                raise self._failure(status, "/generate", str(chunk.finish.message))
        return chunk


def _read_scores(answer: Mapping[str, Any]) -> Scored:
    return [(entry[1], entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
