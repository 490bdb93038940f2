"""What a gateway costs: ours, LiteLLM's, TensorZero's and a buffering proxy in OpenClaw-RL's pattern, side by side.

Each runs alone on one core; the mock engine, the load generator and the broker share the other. The arms take turns
within each round, so that a noisy machine is noisy for all, and every figure is the median of its rounds.
"""

import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import psutil
import typer

from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.stream.kafka import admin
from tests.bench.arms import ARMS, Arm, Place, load_program, mock_engine
from tests.bench.processes import LOAD_CORE, SUBJECT_CORE, Usage, fetched, pin_load, usage
from tests.bench.ratios import ratios
from tests.bench.report import report
from tests.bench.words import make_words

ANSWER_TOKENS, SHORT_ANSWER_TOKENS = 100, 10
REQUEST_BYTES = 5_000
PACES_MS: Mapping[int, int] = {1: 2, 16: 2, 32: 2, 200: 20}  # by concurrency: between two tokens of an answer
PRIMING_PACE_US = 200
ROUND_WITHIN_S = 300.0
SAMPLE_EVERY_S = 30.0
SOAK_CONCURRENCY = 16
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One window of requests."""

    concurrency: int
    seconds: float
    tokens: int = ANSWER_TOKENS
    continued: bool = False
    pace_ms: int = 2


def gateway(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    rounds: Annotated[int, typer.Option(min=0)] = 5,
    quick: Annotated[bool, typer.Option(help="One round of short windows: for a look, not for figures.")] = False,
    soak_s: Annotated[float, typer.Option(help="Watch our memory under load for so long, after the rounds.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Measure these arms; may be repeated.")] = None,
) -> None:
    """What a gateway costs, ours and others, on one core each."""
    names = [name for name in ARMS if not only or name in only]
    seconds = 2.0 if quick else 5.0
    pin_load()
    with tempfile.TemporaryDirectory() as folder, _bench(Path(folder), names) as bench:
        for number in range(1 if quick else rounds):
            bench.round(number, seconds)
        report(bench.figures() | {"soak": bench.soak(soak_s) if soak_s else None}, json_file)


@contextlib.contextmanager
def _bench(folder: Path, names: Sequence[str]) -> Iterator["_Bench"]:
    """All parts up: the arms on one core, everything else on the other."""
    program = load_program()
    model_path, vocabulary = make_words(folder)
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(EmbeddedKafka(folder / "kafka", open_to_all=True))
        asyncio.run(admin.apply(kafka.bootstrap))
        mock_url = stack.enter_context(mock_engine(program, vocabulary, folder))
        place = Place(folder=folder, mock_url=mock_url, bootstrap=kafka.bootstrap, model_path=model_path)
        arms = {name: stack.enter_context(ARMS[name](place)) for name in names}
        command = [str(program), "ask", str(vocabulary)]
        yield _Bench(command=command, arms=arms, mock_url=mock_url, broker_pid=_broker_pid())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What the load saw of one window, and what was used meanwhile."""

    said: Mapping[str, Any]
    cpu_s: float
    waited_s: float
    broker_cpu_s: float
    rss_bytes: int
    rendering_s: float
    num_rendered: float

    @property
    def cpu_ms(self) -> float:
        """The subject's, per request."""
        return self.cpu_s * 1000 / self._num_asked

    @property
    def waiting_share(self) -> float:
        """Of the time in which the subject could run, the share in which others had its core: 0 on a quiet machine."""
        return self.waited_s / max(self.waited_s + self.cpu_s, 1e-9)

    @property
    def broker_cpu_ms(self) -> float:
        """The broker's, per request."""
        return self.broker_cpu_s * 1000 / self._num_asked

    @property
    def render_ms(self) -> float:
        """Per request that was rendered; 0 where nothing is."""
        return self.rendering_s * 1000 / max(self.num_rendered, 1.0)

    @property
    def _num_asked(self) -> int:
        return max(int(self.said["ok"] + self.said["failed"]), 1)


class _Bench:
    """The parts, and what was measured of them so far."""

    def __init__(self, *, command: Sequence[str], arms: Mapping[str, Arm], mock_url: str, broker_pid: int) -> None:
        self._command = command
        self._arms = arms
        self._mock_url = mock_url
        self._broker_pid = broker_pid
        self._measured: dict[tuple[str, int], list[Figures]] = defaultdict(list)
        self._seed = 0

    def round(self, number: int, seconds: float) -> None:
        """Measure every arm at every concurrency, in an order that moves from round to round."""
        names = list(self._arms)
        for concurrency, pace_ms in PACES_MS.items():
            for name in names[number % len(names) :] + names[: number % len(names)]:
                load = _Load(concurrency=concurrency, seconds=seconds, pace_ms=pace_ms)
                figures = self._figures(self._arms[name], load)
                self._measured[name, concurrency].append(figures)
                words = " ".join(f"{key}={value:.4g}" for key, value in figures.items())
                print(f"round={number} arm={name} concurrency={concurrency} {words}", file=sys.stderr, flush=True)

    def figures(self) -> dict[str, Any]:
        """Return the medians by arm and concurrency, failures added up, and what they mean."""
        arms: dict[str, Any] = {name: {"dialect": arm.dialect} for name, arm in self._arms.items()}
        for (name, concurrency), rounds in self._measured.items():
            medians = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
            arms[name][str(concurrency)] = medians | {"failed": sum(figures["failed"] for figures in rounds)}
        return {
            "arms": arms,
            "ratios": ratios(arms),
            "workload": {
                "request_bytes": REQUEST_BYTES,
                "messages": 8,
                "answer_tokens": ANSWER_TOKENS,
                "ms_between_tokens": {str(concurrency): pace for concurrency, pace in PACES_MS.items()},
                "cores": {"subject": SUBJECT_CORE, "load, mock engine and broker": LOAD_CORE},
            },
        }

    def soak(self, seconds: float) -> dict[str, Any]:
        """Load our gateway with conversations that go on, and watch how much memory it holds."""
        arm, samples = self._arms["clawstream"], []
        assert arm.pid is not None
        load = _Load(concurrency=SOAK_CONCURRENCY, seconds=seconds, continued=True)
        with self._asking(arm, load) as asking:
            _go(asking)
            started = time.monotonic()
            while time.monotonic() - started < seconds:
                time.sleep(min(SAMPLE_EVERY_S, seconds))
                minutes = (time.monotonic() - started) / 60
                samples.append({"minutes": minutes, "rss_mb": usage(arm.pid).rss_bytes / 2**20})
                print(f"soak minutes={minutes:.1f} rss_mb={samples[-1]['rss_mb']:.1f}", file=sys.stderr, flush=True)
            said = _result(asking, load)
        later = samples[len(samples) // 2 :]
        slope = None
        if len(later) > 1:
            slope = statistics.linear_regression([one["minutes"] for one in later], [one["rss_mb"] for one in later])
        return {
            "rss_mb": samples,
            "mb_per_minute_in_second_half": slope and slope.slope,
            "requests": said["ok"],
            "failed": said["failed"],
        }

    def _figures(self, arm: Arm, load: _Load) -> Figures:
        """Measure long answers, short ones, and, where the gateway renders, conversations that go on."""
        window = self._window(arm, load)
        said = window.said
        figures = {
            "ttft_ms_p50": said["ttft_ms_p50"],
            "ttft_ms_p99": said["ttft_ms_p99"],
            "requests_per_s": said["ok"] / said["seconds"],
            "chunks_per_request": said["chunks"] / max(said["ok"], 1),
            "failed": said["failed"],
        }
        if arm.pid is None:
            return figures
        short = self._window(arm, replace(load, tokens=SHORT_ANSWER_TOKENS))
        figures |= {
            "cpu_ms_per_request": window.cpu_ms,
            "cpu_ms_per_request_of_10_tokens": short.cpu_ms,
            "cpu_us_per_chunk": (window.cpu_ms - short.cpu_ms) * 1000 / (ANSWER_TOKENS - SHORT_ANSWER_TOKENS),
            "render_ms_per_request": window.render_ms,
            "rss_mb": window.rss_bytes / 2**20,
            "waiting_share": window.waiting_share,
            "failed": said["failed"] + short.said["failed"],
        }
        if arm.metrics_url is not None:
            continued = self._window(arm, replace(load, continued=True))
            if not continued.num_rendered:
                raise RuntimeError(f"no prompt went on from sampled tokens: {load}")
            figures |= {
                "render_ms_per_continued_request": continued.render_ms,
                "cpu_ms_per_continued_request": continued.cpu_ms,
                "broker_cpu_ms_per_request": window.broker_cpu_ms,
                "failed": figures["failed"] + continued.said["failed"],
            }
        return figures

    def _window(self, arm: Arm, load: _Load) -> _Window:
        with self._asking(arm, load) as asking:
            rendered, broker, subject = _rendered(arm, load), usage(self._broker_pid), _used(arm)
            _go(asking)
            said = _result(asking, load)
            subject_after, broker_after, rendered_after = _used(arm), usage(self._broker_pid), _rendered(arm, load)
        return _Window(
            said=said,
            cpu_s=subject_after.cpu_s - subject.cpu_s,
            waited_s=subject_after.waited_s - subject.waited_s,
            broker_cpu_s=broker_after.cpu_s - broker.cpu_s,
            rss_bytes=subject_after.rss_bytes,
            rendering_s=rendered_after[0] - rendered[0],
            num_rendered=rendered_after[1] - rendered[1],
        )

    @contextlib.contextmanager
    def _asking(self, arm: Arm, load: _Load) -> Iterator["subprocess.Popen[str]"]:
        """The load generator, warmed up and not yet counting."""
        self._seed += 1
        command = [
            *self._command, "-url", arm.url, "-model", arm.model, "-concurrency", str(load.concurrency),
            "-tokens", str(load.tokens), "-bytes", str(REQUEST_BYTES), "-seconds", str(load.seconds),
            "-seed", str(self._seed), f"-logprobs={arm.logprobs}".lower(), f"-continued={load.continued}".lower(),
        ]  # fmt: skip
        self._set_pace(PRIMING_PACE_US)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
            try:
                assert asking.stdout is not None
                if asking.stdout.readline() != "primed\n":
                    raise RuntimeError(f"{' '.join(command)} ended with {asking.wait()} before it was primed")
                self._set_pace(load.pace_ms * 1000)
                yield asking
            finally:
                asking.kill()

    def _set_pace(self, pace_us: int) -> None:
        assert fetched(f"{self._mock_url}/pace/{pace_us}", body=b"{}") is not None


def _go(asking: "subprocess.Popen[str]") -> None:
    assert asking.stdin is not None
    asking.stdin.write("go\n")
    asking.stdin.flush()


def _result(asking: "subprocess.Popen[str]", load: _Load) -> Mapping[str, Any]:
    out, _ = asking.communicate(timeout=load.seconds + ROUND_WITHIN_S)
    said: Mapping[str, Any] = orjson.loads(out)
    for why, times in said["why"].items():
        print(f"failed={times} why={why}", file=sys.stderr, flush=True)
    return said


def _used(arm: Arm) -> Usage:
    return Usage(0.0, 0) if arm.pid is None else usage(arm.pid)


def _rendered(arm: Arm, load: _Load) -> tuple[float, float]:
    """Seconds of rendering first requests so far, or continued ones, and how often, by the gateway's own metrics."""
    text = b"" if arm.metrics_url is None else fetched(arm.metrics_url) or b""
    # The load's history begins with answers that were never ours, so what goes on is spliced behind them.
    made = b"(?:continued|spliced)" if load.continued else b"rendered"
    seconds, times = (
        sum(map(float, re.findall(rb'(?m)^clawstream_rendering_seconds_%b\{made="%b"\} (\S+)' % (of, made), text)))
        for of in (b"sum", b"count")
    )
    return seconds, times


def _broker_pid() -> int:
    (pid,) = (
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.name() == "java" and "kafka.Kafka" in process.cmdline()
    )
    return pid
