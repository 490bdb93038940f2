"""The client of vLLM (0.32): answers from its token-in, token-out route, weights by its routes for training.

vLLM has to say whose tokens it gives, so a server whose log-probs are of another distribution is not asked at all.

Full weights need VLLM_SERVER_DEV_MODE=1; without it only adapters change. vLLM's weights have a name, which it stamps
on each token, but it loads files without naming them. So the client names the weights "3>4" before it loads version 4
over version 3: whatever happens to it then, no token is named after weights that did not sample it. A load that fails
leaves the model unusable, and the next token would end vLLM. Then the former files are loaded again; where they are not
known, the weights are named LOST and vLLM stays paused until it took a version over.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from clawstream.errors import TryLater
from clawstream.inference.engine import BASE_VERSION, Chunk, EngineRefused, GenerateRequest, ServerInfo, read_version
from clawstream.inference.http_borders import read_error, shown
from clawstream.inference.http_engine import HttpEngine, message_of, object_of
from clawstream.inference.model_folder import text_config
from clawstream.inference.vllm_dialect import (
    GENERATE,
    Reading,
    has_mode,
    probe,
    read_score,
    write_generate,
    write_score,
)

log = logging.getLogger(__name__)

LOST = "lost"
_BETWEEN = ">"
_FIRST = ("default", "base", str(BASE_VERSION))  # names of the weights that it was started with
_FLAGS = "start vLLM with --logprobs-mode processed_logprobs"


class VllmEngine(HttpEngine):
    """One vLLM server."""

    adapter_routes = "/v1"
    _checked = False  # the server's log-probs are known to be those that we record
    _taken: tuple[str, str] | None = None  # the version that this client loaded last, and its folder

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks as they arrive, the last one with a finish; closing the iterator closes the connection."""
        if request.pictures:
            raise EngineRefused(400, "pictures are not sent to vLLM: ask an SGLang")
        await self._check_mode()
        reading = Reading(request)

        def read(event: bytes) -> Chunk | None:
            try:
                return reading.take(self._element(event, GENERATE))
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise TryLater(
                    f"engine {self._url}: a chunk that is not vLLM's dialect: {shown(repr(error))}"
                ) from error

        try:
            async with aclosing(self._sampled(request, GENERATE, write_generate(request), read)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except TryLater:
            self._checked = False  # it may come back with other flags
            raise

    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs (temperature 1) of input_ids[start:]; the context needs room for one token more."""
        self._refuse_start(input_ids, start)
        body = write_score(input_ids, extra_key=extra_key, lora_name=lora_name)
        found = await self._scored(
            GENERATE,
            body,
            lambda answer: read_score(answer, input_ids, start),
            num_tokens=len(input_ids),
            field="prompt_logprobs",
        )
        return self._right(found, input_ids[start:], start)

    async def pause(self, *, retract: bool = False) -> None:
        """Sample no token until `resume`; whether running requests lose their KV cache, `update_weights` decides."""
        del retract
        await self._ask("/pause?mode=keep")

    async def resume(self) -> None:
        """Go on sampling where `pause` stopped, unless the weights are lost or a load was not finished."""
        name = await self._name()
        if name is None:
            return  # a server without these routes can't have been paused
        if name == LOST or _BETWEEN in name:
            log.warning("engine=%s weights=%s state=paused until it takes a version over", self._url, name)
            return
        await self._ask("/resume")

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        """Serve the weights at `path` as `version`, nothing cached; running requests are prefilled again.

        It is paused meanwhile, if it is not yet. Where the load fails, raises EngineRefused; then the former weights
        are served, or LOST ones are and it stays paused.
        """
        del flush_cache  # vLLM's first chunk does not tell what was cached, so nothing of older weights may stay
        paused = await self._is_paused()
        if not paused:
            await self.pause()
        try:
            await self._change(path, version)
        finally:
            if not paused:
                await self.resume()

    async def _change(self, path: str, version: str) -> None:
        await self._refuse_kept_head(path)
        former = (await self._name() or "").partition(_BETWEEN)[0]
        folder = await self._folder(former)
        await self._rename(f"{former}{_BETWEEN}{version}")
        try:
            await self._reload(path)
        except EngineRefused:
            await self._restore(former, folder)
            raise
        emptied = await self._ask("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if emptied.get("success") is not True:
            raise TryLater(f"engine {self._url}: its prefix cache is not emptied, so it stays paused; asked again")
        await self._rename(version)
        self._taken = (version, path)

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Load the adapter, which requests may name from now on."""
        body = {"lora_name": name, "lora_path": path}
        await self._load(f"{self.adapter_routes}/load_lora_adapter", body, f"adapter {name} at {path}")

    async def server_info(self) -> ServerInfo:
        """Model and context length from /v1/models, which no swap changes; the version from /weight_info."""
        try:
            if not self._checked and not await self._is_paused():  # while it is paused nothing would answer
                await self._check_mode()
            model = await self._model()
            return self._info(model.get("root"), model.get("max_model_len"), await self.weight_version())
        except TryLater:
            self._checked = False  # it may come back with other flags
            raise

    async def _model(self) -> Mapping[str, Any]:
        """What /v1/models says of the model itself."""
        return next((card for card in await self._cards() if card.get("parent") is None), {})

    async def weight_version(self) -> str | None:
        """The name of the weights that it serves; None where it gives none.

        While others are loaded these are the former ones, since nothing is sampled.
        """
        name = await self._name()
        if name is None or _BETWEEN not in name:
            return name
        return name.partition(_BETWEEN)[0] if await self._is_paused() else name

    async def _check_mode(self) -> None:
        """Raise TryLater where the server's log-probs are not those that we record."""
        if self._checked:
            return
        answer = await self._post(GENERATE, probe())
        try:
            right = has_mode(answer)
        except (LookupError, TypeError, ValueError) as error:
            raise TryLater(f"engine {self._url}: log-probs in another form, {error!r}; {_FLAGS}") from error
        if not right:
            raise TryLater(
                f"engine {self._url}: its log-probs are of another distribution than the one that it samples from, so "
                f"nothing is asked of it; {_FLAGS}"
            )
        self._checked = True

    async def _name(self) -> str | None:
        async with self._asking("GET", "/weight_info", None, self._control_timeout) as response:
            if response.status in (404, 405):
                return None
            name = (await self._content(response, "/weight_info")).get("weight_version")
        try:
            return read_version(name)
        except ValueError as error:
            raise TryLater(f"engine {self._url}: /weight_info: {error}") from error

    async def _is_paused(self) -> bool:
        async with self._asking("GET", "/is_paused", None, self._control_timeout) as response:
            if response.status in (404, 405):
                return False
            return (await self._content(response, "/is_paused")).get("is_paused") is True

    async def _rename(self, version: str) -> None:
        await self._ask("/update_weight_version", {"new_version": version})

    async def _refuse_kept_head(self, path: str) -> None:
        """Raise EngineRefused where vLLM would go on with its former output head.

        On a CPU it computes from packed copies of the weights. A load (0.32) packs what the files hold, and they don't
        hold a head that is the model's embedding.
        """
        model = await self._ask("/collective_rpc", {"method": "get_model_inspection"})
        if "backend=CPU" not in str(model.get("results")):
            return
        config = await asyncio.to_thread(text_config, Path(path))
        if config is None or config.get("tie_word_embeddings") is not False:
            raise EngineRefused(
                400,
                f"{path} is not loaded: vLLM on a CPU keeps its former output head where the head is the embedding "
                "(tie_word_embeddings). Train an adapter (training.lora_rank), or serve the policy on a GPU",
            )

    async def _folder(self, version: str) -> str | None:
        """The folder that the version was loaded from; None: not known."""
        if self._taken is not None and self._taken[0] == version:
            return self._taken[1]
        root = (await self._model()).get("root") if version in _FIRST else None
        return root if isinstance(root, str) else None

    async def _restore(self, version: str, folder: str | None) -> None:
        why = "their folder is not known"
        if folder is not None:
            try:
                await self._reload(folder)
            except EngineRefused as error:
                why = error.message
            else:
                await self._rename(version)
                return
        log.error("engine=%s weights=%s state=%s reason=%s", self._url, version, LOST, why)
        await self._rename(LOST)

    async def _reload(self, path: str) -> None:
        await self._load("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}, path)

    async def _load(self, path: str, body: Mapping[str, object], what: str) -> None:
        """Have files loaded. vLLM answers 500 where it can't, and also where it is dead, which its health tells."""
        async with self._asking("POST", path, body, self._load_timeout) as response:
            if response.status != 500:
                await self._content(response, path)
                return
            raw = await read_error(response)
        await self._get("/health")
        raise EngineRefused(400, f"{what} is not loaded: {message_of(object_of(raw), raw)}")

    async def _ask(self, path: str, body: Mapping[str, object] | None = None) -> Mapping[str, Any]:
        """POST to a route for training; raises EngineRefused where the server was started without them."""
        async with self._asking("POST", path, body or {}, self._load_timeout) as response:
            if response.status in (404, 405):
                raise EngineRefused(
                    400,
                    f"it has no route {path.partition('?')[0]}, so its full weights can't change. Start vLLM with "
                    "VLLM_SERVER_DEV_MODE=1, or train an adapter (training.lora_rank)",
                )
            return await self._content(response, path)

    def _is_refusal(self, status: int, content: Mapping[str, Any]) -> bool:
        """Whether a 404 is about what was asked (a model, an adapter, files): a route that is missing says no error."""
        return status == 404 and isinstance(content.get("error"), Mapping)
