"""How one engine takes over one version, while its requests go on.

- Full weights in place, the usual case: pause, update, continue. Running requests keep their KV cache; the gateway
  sends new requests under new cache keys. Our adapters are unloaded first, so that requests under them end before the
  weights below them change.
- Full weights afresh, if it is not certain which weights filled the engine's cache: running requests are retracted, the
  cache is emptied, and the requests are computed again.
- Adapters, each under a name of its own: nothing is paused.

An engine is asked to load full weights only if their tensors fit its model. SGLang (0.5.23) copies tensor by tensor:
its process ends at the first that does not fit, and a missing tensor keeps its old numbers without an error. The model
is read at the path that the engine names, else in the policy's own folder; if neither can be read, nothing is compared.
A quantized engine takes adapters alone.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from clawstream.errors import TryLater, UnusableCheckpoint
from clawstream.events import PolicyActivated, PolicyPublished, PolicyRejected, is_of_policy
from clawstream.inference.engine import (
    BASE_VERSION,
    EngineRefused,
    ServerInfo,
    VersionedEngine,
    adapter_of,
    policy_version,
)
from clawstream.inference.model_folder import ADAPTER_CONFIG, TensorHeader, tensor_headers, text_config, whole_config
from clawstream.weights.rollout import Serving, misnamed, serves

log = logging.getLogger(__name__)

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # cast to the served type when they are copied
# A checkpoint trained on text may lack these: prediction heads for later tokens, and the towers of other media.
_BESIDE_TEXT = re.compile(r"(^|\.)(mtp|visual|vision_\w+|audio_\w+|multi_modal_projector)\.|\.inv_freq$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEAD = "lm_head.weight"


def misfit(
    found: Mapping[str, TensorHeader], expected: Mapping[str, TensorHeader], config: Mapping[str, Any]
) -> str | None:
    """Return which tensors of a checkpoint differ from `expected`, the tensors that the model of `config` has.

    None: it fits. Floating-point precisions are not compared, since they are cast.
    """
    new, old = _by_common_name(found), _by_common_name(expected)
    wrong = [
        f"{name}: found {_shown(new.get(name))}, expected {_shown(old.get(name))}"
        for name in sorted(new.keys() | old.keys())
        if not _fits(name, new.get(name), old.get(name), config)
    ]
    if not wrong:
        return None
    return wrong[0] if len(wrong) == 1 else f"{wrong[0]}; and {len(wrong) - 1} tensors more do not fit"


def _by_common_name(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors by names that are the same in a language model and in a multimodal model that holds it."""
    return {name.replace("language_model.", ""): header for name, header in tensors.items()}


def _fits(name: str, new: TensorHeader | None, old: TensorHeader | None, config: Mapping[str, Any]) -> bool:
    if new is None or old is None:
        return _may_lack(name, config)
    same_numbers = new.dtype == old.dtype or {new.dtype, old.dtype} <= _FLOATS
    return same_numbers and new.shape == old.shape


def _may_lack(name: str, config: Mapping[str, Any]) -> bool:
    if name.endswith(_HEAD):
        return config.get("tie_word_embeddings") is not False  # many families leave it out of their config.json
    layer, num_layers = _LAYER.search(name), config.get("num_hidden_layers")
    beyond = layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers
    return beyond or _BESIDE_TEXT.search(name) is not None


def _shown(header: TensorHeader | None) -> str:
    return "nothing" if header is None else f"{header.dtype} {list(header.shape)}"


def unfit(checkpoint: Path, of_its_model: Iterable[Path]) -> str | None:
    """Return why an engine of the model must not load the checkpoint; None: it fits, or there is nothing to compare.

    `of_its_model` are folders of the model; the checkpoint is compared with the first one whose weights can be read
    here. Only headers are read.
    """
    if (checkpoint / ADAPTER_CONFIG).is_file():
        return (
            f"{checkpoint} is an adapter, and was published as full weights. It is not loaded and what is served "
            "stays; the version that the policy's next step publishes will be loaded"
        )
    try:
        found = tensor_headers(checkpoint)
    except UnusableCheckpoint as error:
        return str(error)
    if found is None:
        return None
    for folder in of_its_model:
        expected = None
        with suppress(UnusableCheckpoint):
            expected = tensor_headers(folder)
        if expected is None:
            continue
        wrong = misfit(found, expected, text_config(folder) or {})
        return wrong and (
            f"{checkpoint} is not a checkpoint of the model in {folder}, which is served: {wrong}. It is not loaded "
            "and what is served stays; publish a checkpoint of that model, or start the engines with another one"
        )
    return None


class SwappingEngine(VersionedEngine, Protocol):
    """The part of an engine's dialect that a weight change needs."""

    async def server_info(self) -> ServerInfo: ...
    async def quantization(self) -> str | None: ...
    async def name_weights(self, version: str) -> None: ...
    async def pause(self, *, retract: bool = False) -> None: ...
    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def load_lora_adapter(self, name: str, path: str) -> None: ...
    async def unload_lora_adapter(self, name: str) -> None: ...


async def serving(engine: SwappingEngine) -> Serving:
    """Return what the engine says it serves. Raises TryLater when it does not answer."""
    return Serving(version=await engine.weight_version(), adapters=frozenset(await engine.lora_adapters()))


async def take_over(
    engine: SwappingEngine,
    version: PolicyPublished,
    now_ms: Callable[[], int],
    *,
    afresh: bool = False,
    model_path: Path | None = None,
) -> PolicyActivated | PolicyRejected:
    """Let `engine` take `version` over while its requests go on; return the outcome.

    `model_path` is a folder of the engine's model that can be read here. An engine that was paused is always told to
    resume. Raises TryLater when the engine does not answer.
    """
    if version.adapter is None:
        served = Path((await engine.server_info()).model_path)
        quantization = await engine.quantization() or await asyncio.to_thread(_quantization_in, served)
        if quantization is not None:
            return await _labelled(engine, version, quantization, now_ms)
        folders = [served, *([] if model_path is None else [model_path])]
        refusal = await asyncio.to_thread(unfit, Path(version.path), folders)
        if refusal is not None:
            return _outcome(engine, version, refusal, 0.0, now_ms())
        loaded = await engine.lora_adapters()
        await forget(engine, [name for name in loaded if _is_of(version.policy_id, name)])
        return await swap(engine, version, now_ms, afresh=afresh)
    refusal = misnamed(version)
    try:
        if refusal is None and version.adapter not in await engine.lora_adapters():
            await engine.load_lora_adapter(version.adapter, version.path)
            if version.adapter not in await engine.lora_adapters():
                refusal = f"it does not list {version.adapter} after it was loaded"
    except EngineRefused as error:
        refusal = str(error)
    return _outcome(engine, version, refusal, 0.0, now_ms())


def _quantization_in(folder: Path) -> str | None:
    """Return how a model's folder says that its weights are stored; None: as they are, or it can't be read."""
    said = (whole_config(folder) or {}).get("quantization_config")
    return None if said is None else str(said.get("quant_method") if isinstance(said, dict) else said)


async def _labelled(
    engine: SwappingEngine, version: PolicyPublished, quantization: str, now_ms: Callable[[], int]
) -> PolicyActivated | PolicyRejected:
    """Let a quantized engine call what it was started with version 0, which it is, in fewer bits; refuse all others.

    Quantized weights are laid out anew once they are loaded, and nothing says that a second loading finds its way.
    """
    refusal = None
    if version.policy_version != BASE_VERSION or policy_version(await engine.weight_version()) != BASE_VERSION:
        refusal = (
            f"its weights are quantized ({quantization}), so full weights are not loaded into it, and what is served "
            "stays. Train an adapter, which is loaded: training.lora_rank. Or start the engine unquantized"
        )
    else:
        await forget(engine, [name for name in await engine.lora_adapters() if _is_of(version.policy_id, name)])
        try:
            await engine.name_weights(str(BASE_VERSION))
        except EngineRefused as error:
            refusal = str(error)
    return _outcome(engine, version, refusal, 0.0, now_ms())


def _is_of(policy_id: str, name: str) -> bool:
    """Whether the name is of an adapter on the policy's weights: its own, or one of a key's policy."""
    adapter = adapter_of(name)
    return adapter is not None and is_of_policy(adapter[0], policy_id)


async def swap(
    engine: SwappingEngine, version: PolicyPublished, now_ms: Callable[[], int], *, afresh: bool = False
) -> PolicyActivated | PolicyRejected:
    """Let `engine` take full weights over, as `take_over` does.

    The pause is measured from the call to pause until the engine samples again, an upper bound of what clients see.
    """
    started = time.perf_counter()
    refusal: str | None = None
    try:
        await engine.pause(retract=afresh)
        await engine.update_weights(version.path, str(version.policy_version), flush_cache=afresh)
    except EngineRefused as error:
        refusal = str(error)
    finally:
        await engine.resume()
    pause_ms = (time.perf_counter() - started) * 1000
    served = await engine.weight_version()
    if refusal is None and not serves(Serving(version=served), version):
        refusal = f"it serves {served} after it took over {version.policy_version}"
    return _outcome(engine, version, refusal, pause_ms, now_ms())


async def forget(engine: SwappingEngine, adapters: list[str]) -> None:
    """Unload each of the adapters as soon as the requests that run under it have ended."""
    for name in adapters:
        try:
            await engine.unload_lora_adapter(name)
        except (EngineRefused, TryLater) as error:
            log.info("adapter_kept engine=%s adapter=%s why=%s", engine.url, name, error)
        else:
            log.info("adapter_unloaded engine=%s adapter=%s", engine.url, name)


def _outcome(
    engine: SwappingEngine, version: PolicyPublished, refusal: str | None, pause_ms: float, at_ms: int
) -> PolicyActivated | PolicyRejected:
    if refusal is not None:
        log.error(
            "policy_rejected engine=%s policy=%s version=%d why=%s",
            engine.url, version.policy_id, version.policy_version, refusal,
        )  # fmt: skip
        return PolicyRejected(
            policy_id=version.policy_id,
            policy_version=version.policy_version,
            engine=engine.url,
            reason=refusal,
            rejected_at_ms=at_ms,
        )
    log.info(
        "policy_activated engine=%s policy=%s version=%d pause_ms=%.1f",
        engine.url, version.policy_id, version.policy_version, pause_ms,
    )  # fmt: skip
    return PolicyActivated(
        policy_id=version.policy_id,
        policy_version=version.policy_version,
        engine=engine.url,
        adapter=version.adapter,
        pause_ms=pause_ms,
        num_bytes=version.num_bytes,
        activated_at_ms=at_ms,
    )
