"""Time to the first token: gateway, engine and plain transformers side by side.

Time to the first token of one request over a prompt of 5 KB, through the gateway (with its log on a real
Kafka), from the engine alone, and from plain transformers on the same model and tokens. The three take turns, so that a
noisy machine is noisy for all; every prompt begins differently, so that no cached prefix serves any.
"""

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from clawstream.inference.engine import GenerateRequest, SamplingParams
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.local.servers.server_process import reserved
from clawstream.rendering.renderer import PromptRenderer
from clawstream.stream.kafka import admin
from tests.bench.report import report
from tests.parts.engine.process import cpu_engine
from tests.parts.engine.tiny_model import SPECIAL_TOKENS
from tests.renderers import load_renderer

PROMPT_BYTES = 5_000
WORDS = [
    "the",
    "agent",
    "reads",
    "a",
    "file",
    "and",
    "runs",
    "the",
    "command",
    "again",
    "because",
    "the",
    "user",
    "said",
    "that",
    "the",
    "answer",
    "was",
    "not",
    "right",
]


def ttft(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    rounds: Annotated[int, typer.Option(min=5)] = 40,
) -> None:
    """Time to the first token: gateway, engine and plain transformers side by side."""
    with tempfile.TemporaryDirectory() as folder:
        report(asyncio.run(_ttft(Path(folder), rounds)), json_file)


async def _ttft(folder: Path, rounds: int) -> dict[str, float | int]:
    torch.set_num_threads(1)
    model_path = _model(folder / "model")
    renderer = load_renderer(model_path, "qwen3", enable_thinking=False)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(EmbeddedKafka(folder / "kafka", open_to_all=True))
        engine_port, gateway_port = stack.enter_context(reserved()), stack.enter_context(reserved())
        engine_url = stack.enter_context(cpu_engine(model_path, engine_port, "--threads", "1"))
        await admin.apply(kafka.bootstrap)
        async with _gateway(kafka.bootstrap, engine_url, gateway_port, model_path), aiohttp.ClientSession() as http:
            gateway_url = f"http://127.0.0.1:{gateway_port}"
            engine = SglangEngine(http, engine_url)
            times: dict[str, list[float]] = {name: [] for name in ("engine", "gateway", "render", "transformers")}
            for number in range(rounds + 3):
                measured = await _round(number, http, gateway_url, engine, renderer, model)
                if number >= 3:  # the first three warm up
                    for name, ms in measured.items():
                        times[name].append(ms)
    p50 = {name: statistics.median(values) for name, values in times.items()}
    return {
        "engine_ms_p50": p50["engine"],
        "gateway_ms_p50": p50["gateway"],
        "render_ms_p50": p50["render"],
        "added_ms": p50["gateway"] - p50["engine"] - p50["render"],
        "transformers_ms_p50": p50["transformers"],
        "prompt_bytes": PROMPT_BYTES,
        "prompt_tokens": len(renderer.prompt_ids(_asked(0, "gateway"), {})),
        "rounds": rounds,
    }


async def _round(
    number: int,
    http: aiohttp.ClientSession,
    gateway_url: str,
    engine: SglangEngine,
    renderer: PromptRenderer,
    model: Any,
) -> dict[str, float]:
    """Ask each once, in an order that changes from round to round; return ms by name."""
    measured: dict[str, float] = {}

    async def gateway() -> None:
        body = {
            "model": "policy",
            "messages": _asked(number, "gateway"),
            "stream": True,
            "max_tokens": 4,
            "temperature": 1,
        }
        started = time.perf_counter()
        async with http.post(f"{gateway_url}/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if "gateway" not in measured and _has_content(line):
                    measured["gateway"] = (time.perf_counter() - started) * 1000

    async def alone() -> None:
        ids = renderer.prompt_ids(_asked(number, "engine"), {})
        request = GenerateRequest(input_ids=ids, sampling=SamplingParams(max_new_tokens=4, ignore_eos=True))
        started = time.perf_counter()
        async with contextlib.aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.token_ids and "engine" not in measured:
                    measured["engine"] = (time.perf_counter() - started) * 1000

    async def plain() -> None:
        ids = torch.tensor([renderer.prompt_ids(_asked(number, "plain"), {})])
        started = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, max_new_tokens=1, do_sample=True, attention_mask=torch.ones_like(ids))
        measured["transformers"] = (time.perf_counter() - started) * 1000

    async def render() -> None:
        messages = _asked(number, "render")
        started = time.perf_counter()
        renderer.prompt_ids(messages, {})
        measured["render"] = (time.perf_counter() - started) * 1000

    asked: list[Callable[[], Any]] = [gateway, alone, plain, render]
    random.Random(number).shuffle(asked)
    for ask in asked:
        await ask()
    if "gateway" not in measured:  # the random policy began with a token that is no text: ask with another prompt
        return await _round(number + 1_000, http, gateway_url, engine, renderer, model)
    return measured


def _has_content(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line.removeprefix(b"data: "))["choices"]
    return bool(choices) and bool(choices[0]["delta"].get("content"))


def _asked(number: int, who: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(number, who)}]


def _text(number: int, who: str) -> str:
    """PROMPT_BYTES of words that differ from the first on."""
    rng = random.Random(f"{number} {who}")
    text = f"{rng.random()} "
    while len(text) < PROMPT_BYTES:
        text += rng.choice(WORDS) + " "
    return text[:PROMPT_BYTES]


def _model(folder: Path) -> Path:
    """A random Qwen3-shaped policy of the demo's size, with a byte-pair tokenizer trained on the benchmark's words."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=512, show_progress=False
    )
    tokenizer.train_from_iterator([_text(n, "training") + "\n" for n in range(20)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@contextlib.asynccontextmanager
async def _gateway(bootstrap: str, engine_url: str, port: int, model_path: Path) -> AsyncIterator[None]:
    """The gateway as users run it, ready."""
    settings = model_path.parent / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "environment": False,
                "kafka": {"bootstrap": bootstrap},
                "engine": {"urls": [engine_url], "model_path": str(model_path)},
                "gateway": {"port": port},
                "policy": {"renderer": "qwen3", "enable_thinking": False},
            }
        )
    )
    command = [sys.executable, "-m", "clawstream", "--config", str(settings), "gateway"]
    with (model_path.parent / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)  # noqa: ASYNC220
        try:
            async with aiohttp.ClientSession() as http, asyncio.timeout(90):
                while not await _ready(http, f"http://127.0.0.1:{port}/readyz"):
                    if process.poll() is not None:
                        raise RuntimeError((model_path.parent / "gateway.log").read_text())
                    await asyncio.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(20)


async def _ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
