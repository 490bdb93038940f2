"""Tokens a second that a CPU samples from a model's folder: our engine, plain transformers and llama.cpp.

The arms take turns at each number of streams, so that a noisy machine is noisy for all. Each stream asks one everyday
request and samples the same number of tokens, whatever comes, at temperature 0.6. Our engine and llama.cpp are asked
over HTTP, one connection a stream; transformers computes the streams as one padded batch in this process. llama.cpp
reads a GGUF file, whose weights are of four bits where it is the one that SmolLM2's folder was made from; transformers
computes in float32, and our engine by weights of both precisions.
"""

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import torch
import typer
from transformers import AutoModelForCausalLM

from clawstream.config import PolicySettings
from clawstream.inference.engine import GenerateRequest, SamplingParams
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.rendering.renderer import PromptRenderer
from clawstream.simulation.everyday import Split, requests_of
from tests.bench.report import report
from tests.parts.engine.process import cpu_engine, wait_until_ready

TEMPERATURE = 0.6
LLAMA = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_ctx, params.n_gpu_layers = 1024 * params.n_parallel, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(params)
sys.stdin.read()
"""
Prompts = Sequence[Sequence[int]]
Arm = Callable[[Prompts, int], Awaitable[None]]  # (prompts, tokens to sample for each)


def speed(
    model: Annotated[Path, typer.Option(help="The model's folder, as of `clawstream model get smollm2`.")],
    streams: Annotated[str, typer.Option(help="At once, with commas.")] = "1,8,16",
    num_tokens: Annotated[int, typer.Option("--tokens", help="Sampled in each stream.")] = 64,
    rounds: Annotated[int, typer.Option(help="Of each arm; the median counts.")] = 3,
    threads: Annotated[int, typer.Option(help="Of each arm.")] = 2,
    gguf: Annotated[Path | None, typer.Option(help="The model for llama.cpp; none: it is left out.")] = None,
    llama: Annotated[str, typer.Option(help="A Python with the package xllamacpp, which brings llama.cpp.")] = "python",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Measure tokens a second of each arm at each number of streams."""
    torch.set_num_threads(threads)
    renderer = PromptRenderer.of(PolicySettings(), model)
    prompts = [
        list(renderer.prompt_ids(({"role": "user", "content": said},), {})) for said in requests_of(Split.PEOPLE)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        linked = Path(folder) / "model"
        linked.symlink_to(model.absolute())
        arms: dict[str, Arm] = {"transformers": _transformers(model)}
        for dtype in ("float32", "float16"):
            port = stack.enter_context(reserved())
            url = stack.enter_context(cpu_engine(linked, port, "--threads", str(threads), "--dtype", dtype))
            arms[f"engine {dtype}"] = _engine(url)
        for num_streams in map(int, streams.split(",")):
            with ExitStack() as each:
                if gguf is not None:
                    arms["llama.cpp"] = each.enter_context(_llama(llama, gguf, num_streams, threads, Path(folder)))
                rows += asyncio.run(_measured(arms, prompts, num_streams, num_tokens, rounds))
    report({"model": model.name, "tokens": num_tokens, "rounds": rounds, "threads": threads, "rows": rows}, json_file)


async def _measured(
    arms: dict[str, Arm], prompts: Prompts, num_streams: int, num_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    took_s: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        first = turn * num_streams
        chosen = [prompts[(first + number) % len(prompts)] for number in range(num_streams)]
        for name, arm in arms.items():
            started = time.perf_counter()
            await arm(chosen, num_tokens)
            if turn:  # the first warms up
                took_s[name].append(time.perf_counter() - started)
    found = {name: num_streams * num_tokens / median(seconds) for name, seconds in took_s.items()}
    typer.echo(f"{num_streams} streams: {', '.join(f'{name} {rate:.0f}/s' for name, rate in found.items())}", err=True)
    return [{"streams": num_streams, "arm": name, "tokens_per_s": rate} for name, rate in found.items()]


def _engine(url: str) -> Arm:
    async def run(prompts: Prompts, num_tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=num_tokens, temperature=TEMPERATURE, ignore_eos=True)

        async def one(engine: SglangEngine, prompt: Sequence[int]) -> None:
            chunks = [chunk async for chunk in engine.generate(GenerateRequest(input_ids=prompt, sampling=sampling))]
            sampled = sum(len(chunk.token_ids) for chunk in chunks)
            assert sampled == num_tokens, f"{sampled} tokens came, expected {num_tokens}"

        async with aiohttp.ClientSession() as http:
            engine = SglangEngine(http, url)
            await asyncio.gather(*(one(engine, prompt) for prompt in prompts))

    return run


def _transformers(folder: Path) -> Arm:
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    async def run(prompts: Prompts, num_tokens: int) -> None:
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made_BT = module.generate(
            ids_BT, attention_mask=mask_BT, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0,
            min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0,
        )  # fmt: skip
        assert made_BT.shape[1] == longest + num_tokens, f"{made_BT.shape[1] - longest} tokens came"

    return run


@contextmanager
def _llama(python: str, gguf: Path, num_streams: int, threads: int, folder: Path) -> Iterator[Arm]:
    """Yield an arm that asks a server of llama.cpp; its process has ended afterwards."""
    with reserved() as port, (folder / f"llama-{num_streams}.log").open("wb") as log:
        command = [python, "-c", LLAMA, str(gguf), str(port), str(num_streams), str(threads)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, port, Path(log.name))

            async def run(prompts: Prompts, num_tokens: int) -> None:
                async def one(http: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
                    asked = {
                        "prompt": list(prompt), "n_predict": num_tokens, "ignore_eos": True, "cache_prompt": False,
                        "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
                    }  # fmt: skip
                    async with http.post(f"{url}/completion", json=asked) as response:
                        sampled = (await response.json())["tokens_predicted"]
                    assert sampled == num_tokens, f"{sampled} tokens came, expected {num_tokens}"

                async with aiohttp.ClientSession() as http:
                    await asyncio.gather(*(one(http, prompt) for prompt in prompts))

            yield run
        finally:
            process.terminate()
            process.wait(timeout=20)
