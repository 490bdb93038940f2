"""One of two engines fails under load: what clients notice, and how long until it serves again.

Two CPU engines in processes of their own behind one gateway, and the weights stage, on a log in memory. Clients hold
conversations, streamed, and ask again once where an answer fails. One engine is killed (or stopped, so that it accepts
connections and never answers); while it is away a new version is published; then it comes back on its port with the
base weights. Each answer's log-probs are computed again by plain transformers with the weights that its label names,
from its whole prompt: a wrong label, or a cache that other weights filled, shows as another number.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import torch
import typer
from transformers import AutoModelForCausalLM

from clawstream.config import EngineSettings, GatewaySettings, PolicySettings, Settings
from clawstream.events import ExchangeCompleted, PolicyActivated, PolicyPublished
from clawstream.gateway.http.connection import Bounds
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import die_with_parent, reserved
from clawstream.stream import topics
from clawstream.stream.stage import Record
from clawstream.weights.stage import keep_current
from tests.bench.report import report
from tests.fakes.memory_log import MemoryLog
from tests.forks import forked_engine
from tests.parts.engine.tiny_model import make_model
from tests.parts.gateway.running_gateway import running
from tests.sessions import history

WITHIN_S = 400.0  # an engine starts in 5 s, and on a machine full of tests in minutes
SAME_NATS = 0.01


def replicas(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    sessions: Annotated[int, typer.Option(min=1)] = 8,
    steady_s: Annotated[float, typer.Option(min=0.5, help="before the failure, and after the return")] = 5.0,
    hang: Annotated[bool, typer.Option(help="stop the engine in place of killing it")] = False,
) -> None:
    """One of two engines fails under load: what clients notice, and how long until it serves again."""
    with tempfile.TemporaryDirectory() as folder:
        failed = asyncio.run(one_fails(Path(folder), sessions=sessions, steady_s=steady_s, hang=hang))
    report(failed, json_file)


@dataclass(kw_only=True)
class Replica:
    """An engine as a process that can be killed and started again on its port."""

    model: Path
    port: int
    forked: bool = False  # begins in less time than a user's
    process: "subprocess.Popen[bytes] | ForkServerProcess | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it with the base weights."""
        arguments = ["--model-path", str(self.model), "--port", str(self.port), "--threads", "1"]
        arguments += ["--weight-version", "0"]
        log = self.model.parent / f"engine-{self.port}.log"
        if self.forked:
            self.process = forked_engine(arguments, log)
            return
        with log.open("ab") as words:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "clawstream.local.engine", *arguments],
                stdout=words, stderr=words, preexec_fn=die_with_parent,
            )  # fmt: skip

    def send(self, number: int) -> None:
        """Send the process a signal."""
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill it; it is gone afterwards."""
        if self.process is None:
            return
        self.process.kill()
        if isinstance(self.process, subprocess.Popen):
            self.process.wait(20)
        else:
            self.process.join(20)


@dataclass(kw_only=True)
class Tally:
    """What clients saw."""

    requests: int = 0
    failed_first: int = 0
    failed_after_retry: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)


async def one_fails(
    folder: Path,
    *,
    sessions: int = 8,
    steady_s: float = 5.0,
    hang: bool = False,
    ask_every_s: float = 2.0,
    forked: bool = False,
) -> dict[str, Any]:
    """Let one of two engines fail under load and come back; return the figures."""
    models = [make_model(folder / f"v{version}", seed=version) for version in range(4)]
    log = MemoryLog()
    with ExitStack() as stack:
        engines = [Replica(model=models[0], port=stack.enter_context(reserved()), forked=forked) for _ in range(2)]
        for engine in engines:
            engine.start()
            stack.callback(engine.end)
        async with _serving(models, engines, log, ask_every_s) as (url, http):
            figures, tally = await _under_load(url, http, models, engines, log, sessions, steady_s, hang=hang)
    checked = await check_labels(log, models)
    return {
        "requests": tally.requests,
        "failed_first": tally.failed_first,
        "failed_after_retry": tally.failed_after_retry,
        **figures,
        **checked,
        "failure": "hang" if hang else "kill -9",
        "sessions": sessions,
    }


async def _under_load(
    url: str,
    http: aiohttp.ClientSession,
    models: Sequence[Path],
    engines: Sequence[Replica],
    log: MemoryLog,
    sessions: int,
    steady_s: float,
    *,
    hang: bool,
) -> tuple[dict[str, Any], Tally]:
    tally, lost = Tally(), engines[1]
    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(_converse(http, url, number, tally))
        await _publish(log, 1, models[1])
        await _until(lambda: _state(http, url, engines, version=1, offered=2))
        await asyncio.sleep(steady_s)
        lost.send(signal.SIGSTOP if hang else signal.SIGKILL)
        failed_at = time.perf_counter()
        await _until(lambda: _state(http, url, engines, offered=1))
        out_s = time.perf_counter() - failed_at
        await _publish(log, 2, models[2])
        await _until(lambda: _state(http, url, engines[:1], version=2))
        await _until(lambda: _state(http, url, [lost], in_flight=0))  # while it hangs, so that nothing else frees them
        let_go_s = time.perf_counter() - failed_at
        lost.end()
        lost.start()
        started_at = time.perf_counter()
        async with asyncio.timeout(WITHIN_S):
            while not await healthy(http, lost.url):
                await asyncio.sleep(0.02)
        up_at = time.perf_counter()
        await _until(lambda: _state(http, url, engines, version=2, offered=2))
        back_at = time.perf_counter()
        await _publish(log, 3, models[3])
        await _until(lambda: _state(http, url, engines, version=3, offered=2))
        await asyncio.sleep(steady_s)
        tally.stop.set()
    version = await SglangEngine(http, lost.url).weight_version()
    return {
        "taken_out_s": round(out_s, 3),
        "requests_let_go_s": round(let_go_s, 3),
        "engine_start_s": round(up_at - started_at, 3),
        "back_in_service_s": round(back_at - up_at, 3),
        "version_after": int(version or -1),
    }, tally


async def check_labels(log: MemoryLog, models: Sequence[Path]) -> dict[str, Any]:
    """Compute the log-probs of each answer's first version again; return how many differ, and what was taken over."""
    torch.set_num_threads(1)  # tiny models: more cost more than they compute
    loaded = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for model in models]
    events = [
        record.event
        async for records in log.follow((topics.EXCHANGES, topics.POLICY), until_end=True)
        for record in records
        if isinstance(record, Record)
    ]
    exchanges = [event for event in events if isinstance(event, ExchangeCompleted)]
    prompts = history(exchanges)
    wrong = sum(_is_wrong(exchange, prompts[exchange.exchange_id].token_ids, loaded) for exchange in exchanges)
    activated = [event for event in events if isinstance(event, PolicyActivated)]
    return {
        "checked_answers": len(exchanges),
        "cached_answers": sum((exchange.cached_tokens or 0) > 0 for exchange in exchanges),
        "mixed_version_answers": sum(len(exchange.versions) > 1 for exchange in exchanges),
        "mislabelled_answers": wrong,
        "takeovers": len(activated),
        "pause_ms_max": round(max(event.pause_ms for event in activated), 1),
    }


@torch.inference_mode()
def _is_wrong(exchange: ExchangeCompleted, prompt: Sequence[int], models: Sequence[Any]) -> bool:
    """Whether the first version named did not sample its tokens; what it sampled later ran on older keys and values."""
    span = exchange.versions[0]
    ids = torch.tensor([[*prompt, *exchange.output_ids[: span.num_tokens]]])
    logits = models[span.policy_version](ids).logits[0, len(prompt) - 1 : -1].float()
    logp = torch.log_softmax(logits / (exchange.sampling.temperature or 1.0), -1)
    again = logp.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    said = torch.tensor(exchange.output_logprobs[: span.num_tokens])
    return not torch.allclose(again, said, atol=SAME_NATS)


async def _converse(http: aiohttp.ClientSession, url: str, number: int, tally: Tally) -> None:
    """Hold one conversation after the other until it is time to stop; ask again once where an answer fails."""
    rng = random.Random(number)
    while not tally.stop.is_set():
        session, messages = f"{number}-{rng.random()}", []
        for turn in range(6):
            if tally.stop.is_set():
                return
            messages.append({"role": "user", "content": f"{turn}: what comes after {rng.random():.12f}, and why?"})
            body = {
                "model": "policy", "messages": messages, "stream": True, "max_tokens": rng.randint(8, 60),
                "temperature": 1.0, "chat_template_kwargs": {"enable_thinking": False},
            }  # fmt: skip
            tally.requests += 1
            said = await _ask(http, url, session, body)
            if said is None:
                tally.failed_first += 1
                said = await _ask(http, url, session, body)
                tally.failed_after_retry += said is None
            messages.append({"role": "assistant", "content": said or ""})


async def _ask(http: aiohttp.ClientSession, url: str, session: str, body: dict[str, Any]) -> str | None:
    """Return the answer's text; None where it did not come to its end."""
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body, headers={"X-Session-Id": session}) as answer:
            raw = (await answer.read()).decode()
    except aiohttp.ClientError:
        return None
    if answer.status != 200 or not raw.endswith("data: [DONE]\n\n"):
        return None
    chunks = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n")[:-2] if line.startswith("data: ")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def _state(
    http: aiohttp.ClientSession,
    url: str,
    engines: Sequence[Replica],
    *,
    version: int | None = None,
    offered: int | None = None,
    in_flight: int | None = None,
) -> bool:
    """Whether the gateway says of these engines the version, how many are offered, and the requests put to each."""
    async with http.get(f"{url}/metrics") as answer:
        lines = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[:1] != "#")

    def gauge(name: str) -> list[float]:
        return [float(lines.get(f'clawstream_{name}{{engine="{engine.url}"}}', -1)) for engine in engines]

    found = version is None or gauge("policy_version") == [version] * len(engines)
    found = found and (in_flight is None or gauge("engine_requests_in_flight") == [in_flight] * len(engines))
    return found and (offered is None or sum(gauge("engine_offered")) == offered)


async def _publish(log: MemoryLog, version: int, path: Path) -> None:
    published = PolicyPublished(
        policy_id="policy", policy_version=version, parent_version=version - 1, path=str(path), adapter=None,
        manifest_sha256=None, num_bytes=1, published_at_ms=int(time.time() * 1000),
    )  # fmt: skip
    await log.append([published])


@asynccontextmanager
async def _serving(
    models: Sequence[Path], engines: Sequence[Replica], log: MemoryLog, ask_every_s: float
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """The gateway and the weights stage over the engines."""
    settings = Settings(
        data_dir=models[0].parent,
        engine=EngineSettings(urls=tuple(engine.url for engine in engines), model_path=models[0]),
        policy=PolicySettings(renderer="qwen3", enable_thinking=False),
        gateway=GatewaySettings(port=0),
    )
    stop = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async with asyncio.timeout(WITHIN_S):
            for engine in engines:
                while not await healthy(http, engine.url):
                    await asyncio.sleep(0.05)
        async with (
            running(settings, log, bounds=Bounds(engine_answers_within_s=1.0)) as url,
            asyncio.TaskGroup() as group,
        ):
            clients = [SglangEngine(http, engine.url) for engine in engines]
            group.create_task(keep_current(clients, log, policy_id="policy", stop=stop, ask_every_s=ask_every_s))
            try:
                await _until(lambda: _state(http, url, engines, offered=2))
                yield url, http
            finally:
                stop.set()


async def healthy(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether the engine answers."""
    try:
        async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=2)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await holds():
            await asyncio.sleep(0.02)
