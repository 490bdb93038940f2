"""The engine itself, and the thread that owns it: jobs in, deltas out, one step at a time.

Every step computes one token for each decoding job and, within a budget, prompts of jobs that wait. Weights change only
between two steps, so exactly one version computed each token. Only the worker's thread touches the core. When it ends,
for whatever reason, every request is aborted and the server stops.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from clawstream.inference.dialect import Logprob, TokenDelta
from clawstream.local.engine.model import Adapters, RowModel, plan_step
from clawstream.local.engine.rows import Decode, Job, JobRows, KvRows, finish_reason
from clawstream.local.engine.sampling import draw, scaled_logprobs, shaped, top_logprobs

# Prompt tokens that a step may compute: many when no job waits for a token, few while jobs stream.
IDLE_PREFILL_TOKENS = 8192
BUSY_PREFILL_TOKENS = 512
# Pairs of a token and an earlier one that a step may compute: in a long prompt the pairs take most of the time.
IDLE_PREFILL_PAIRS = 1 << 21
BUSY_PREFILL_PAIRS = 1 << 19
_LEAST_PIECE_TOKENS = 16  # so that a long prompt gets finished although new short ones keep coming
# Logits of a prompt that is scored are kept below this many numbers (256 MB).
_SCORED_LOGITS = 1 << 26

Output = tuple[Job, TokenDelta]
# The longest a step waits for the event loop to take the tokens of the step before.
_HAND_OVER_S = 0.01


@dataclass(slots=True, kw_only=True)
class _Budget:
    """How much of prompts a step may still compute."""

    tokens: int
    pairs: int

    def piece(self, past: int, share: int) -> int:
        """Return how many tokens after `past` others fit into 1 / `share` of the remaining budget."""
        # In `take`, count tokens cost count * (past + count) pairs; here that is solved for count.
        half = past / 2
        fits = int((half * half + max(self.pairs, 0) / share) ** 0.5 - half)
        return max(min(fits, self.tokens // share), _LEAST_PIECE_TOKENS)

    def take(self, past: int, count: int) -> None:
        self.tokens -= count
        self.pairs -= count * (past + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One step's tokens: the jobs that decode (rows 0..B-1), then (job, count) of prompt."""

    decoding: Sequence[Job]
    filling: Sequence[tuple[Job, int]]


class Core:
    """All jobs of one model. `busy` is False when there is nothing to compute."""

    def __init__(self, model: RowModel, *, num_rows: int, version: str, decode: Decode | None) -> None:
        self._model = model
        self._rows = JobRows(KvRows(num_rows=num_rows, context_length_tokens=model.context_length_tokens))
        self._waiting: deque[Job] = deque()
        self._decode = decode
        self.adapters = Adapters(model.module)
        self.version = version

    @property
    def busy(self) -> bool:
        return bool(self._rows.jobs or self._waiting)

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def abort(self, job: Job, message: str) -> list[Output]:
        """Remove the job; its last delta says why. Does nothing where it had finished."""
        if job.finished:
            return []
        if job in self._rows.jobs:
            self._rows.release(job)
        else:
            self._waiting.remove(job)
        job.finished = True
        return [(job, job.delta(self.version, {"type": "abort", "message": message}))]

    def jobs(self) -> list[Job]:
        return [*self._rows.jobs, *self._waiting]

    def swap_weights(self, weights: Mapping[str, Tensor], version: str | None) -> None:
        """Sample by these weights from the next token on; running jobs keep their keys, later ones reuse none."""
        self._model.apply(weights)
        self._rows.new_epoch()
        if version is not None:
            self.version = version

    def forget_cache(self) -> None:
        """Let no later job reuse a key that exists now."""
        self._rows.new_epoch()

    def retract(self) -> None:
        """Let running jobs wait again, without their keys, to be computed again by the weights then in use."""
        jobs = self._rows.release_all()
        for job in jobs:
            job.restart()
        self._waiting.extendleft(reversed(jobs))

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One forward pass over everything that can run."""
        work = self._plan()
        self._rows.reserve()
        jobs = [*work.decoding, *(job for job, _ in work.filling)]
        counts = [1] * len(work.decoding) + [count for _, count in work.filling]
        drawn, scored, keep = _wanted_logits(jobs, counts)
        outputs: list[Output] = []
        if jobs:
            logits = self._forward(work, jobs, counts, keep)
            self._note_scores(scored, logits[len(drawn) :])
            for job, count in zip(jobs, counts, strict=True):
                job.num_computed += count
            if drawn:
                outputs = self._draw(drawn, logits[: len(drawn)])
        return outputs + self._finish_scored()

    def _plan(self) -> _Work:
        num_decoding = self._rows.arrange()
        budget = _Budget(
            tokens=BUSY_PREFILL_TOKENS if num_decoding else IDLE_PREFILL_TOKENS,
            pairs=BUSY_PREFILL_PAIRS if num_decoding else IDLE_PREFILL_PAIRS,
        )
        filling: list[tuple[Job, int]] = []
        # The shortest rest first, and half of the budget stays for later jobs: none waits for a long prompt.
        for job in sorted(self._rows.jobs[num_decoding:], key=lambda job: job.target - job.num_computed):
            self._fill(job, budget, filling, share=2)
        while budget.tokens > 0 and self._waiting and not self._rows.full:
            job = self._waiting.popleft()
            self._rows.admit(job)
            self._fill(job, budget, filling, share=1)
        return _Work(decoding=self._rows.jobs[:num_decoding], filling=filling)

    def _fill(self, job: Job, budget: _Budget, filling: list[tuple[Job, int]], *, share: int) -> None:
        count = min(job.target - job.num_computed, budget.piece(job.num_computed, share))
        if job.call.logprob_start is not None:
            count = min(count, max(16, _SCORED_LOGITS // self._model.vocab_size))
        if count > 0:
            filling.append((job, count))
            budget.take(job.num_computed, count)

    def _forward(self, work: _Work, jobs: Sequence[Job], counts: Sequence[int], keep: Sequence[int]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        for job, count in zip(jobs, counts, strict=True):
            past = job.num_computed
            tokens.extend(job.tokens[past : past + count])
            positions.extend(range(past, past + count))
        row_of = {id(job): row for row, job in enumerate(self._rows.jobs)}
        prefills = [(row_of[id(job)], job.num_computed, count) for job, count in work.filling]
        step = plan_step(self._rows.kv, [len(job.tokens) for job in work.decoding], prefills)
        with self.adapters.using([job.call.request.lora_name for job in jobs], counts):
            return self._model.forward(tokens, positions, step, keep)

    def _draw(self, drawn: Sequence[Job], logits: Tensor) -> list[Output]:
        num_top = max(job.call.top_logprobs_num for job in drawn)
        result = draw(
            shaped(logits, drawn),
            [job.call.request.sampling for job in drawn],
            [job.seed for job in drawn],
            [job.num_answered for job in drawn],
            num_top,
        )
        outputs = []
        for index, job in enumerate(drawn):
            job.add_token(result.token_ids[index], self.version)
            finish = finish_reason(job, self._decode)
            delta = job.delta(self.version, finish)
            delta.token_ids.append(result.token_ids[index])
            delta.logprobs.append(result.logprobs_nats[index])
            if job.call.top_logprobs_num:
                delta.top_logprobs = [_written(result.top[index][: job.call.top_logprobs_num])]
            if finish is not None:
                job.finished = True
                self._rows.release(job)
            outputs.append((job, delta))
        return outputs

    def _note_scores(self, scored: Sequence[tuple[Job, int]], logits: Tensor) -> None:
        if not scored:
            return
        # Prompts are scored at temperature 1, whatever the answer is sampled at, as SGLang does.
        logp = scaled_logprobs(logits, [1.0] * len(scored))
        targets = torch.tensor([job.tokens[position + 1] for job, position in scored]).unsqueeze(1)
        values = logp.gather(1, targets).squeeze(1).tolist()
        num_top = max(job.call.top_logprobs_num for job, _ in scored)
        top = top_logprobs(logp, num_top) if num_top else []
        for index, (job, position) in enumerate(scored):
            if not job.input_logprobs:
                job.input_logprobs.append((None, job.tokens[position], None))
                job.input_top.append(None)
            job.input_logprobs.append((values[index], job.tokens[position + 1], None))
            if num_top:
                job.input_top.append(_written(top[index][: job.call.top_logprobs_num]))

    def _finish_scored(self) -> list[Output]:
        """End the jobs that wanted no token, once their prompt is computed."""
        done = [job for job in self._rows.jobs if not job.max_new_tokens and job.num_computed >= job.target]
        for job in done:
            if job.call.logprob_start == job.num_prompt - 1:
                job.input_logprobs.append((None, job.tokens[-1], None))
                job.input_top.append(None)
            job.finished = True
            self._rows.release(job)
        return [(job, job.delta(self.version, {"type": "length", "length": 0})) for job in done]


def _wanted_logits(jobs: Sequence[Job], counts: Sequence[int]) -> tuple[list[Job], list[tuple[Job, int]], list[int]]:
    """Return jobs that draw a token, (job, position) pairs to score, and the packed indices of both, in that order."""
    drawn, drawn_at, scored, scored_at = [], [], [], []
    first = 0
    for job, count in zip(jobs, counts, strict=True):
        past = job.num_computed
        if job.max_new_tokens and past + count == len(job.tokens):
            drawn.append(job)
            drawn_at.append(first + count - 1)
        for position in job.scored_positions(past, count):
            scored.append((job, position))
            scored_at.append(first + position - past)
        first += count
    return drawn, scored, drawn_at + scored_at


def _written(top: Sequence[tuple[float, int]]) -> list[Logprob]:
    return [(value, token, None) for value, token in top]


Result = TypeVar("Result")

Command = Callable[[Core], Iterable[Output]]


class EngineWorker:
    """Runs `core` until `stop`; deltas reach their sinks on `loop`."""

    def __init__(
        self, core: Core, loop: asyncio.AbstractEventLoop, *, num_threads: int, on_end: Callable[[], None]
    ) -> None:
        self._core = core
        self._loop = loop
        self._num_threads = num_threads
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._paused = False
        self._handed_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Abort running requests and end the thread."""
        self._commands.put(None)
        self._thread.join()

    def post(self, command: Command) -> None:
        """Queue the command; it runs between two steps, after those posted before it."""
        self._commands.put(command)

    async def call(self, function: Callable[[Core], Result]) -> Result:
        future: Future[Result] = Future()

        def command(core: Core) -> Iterable[Output]:
            try:
                future.set_result(function(core))
            except BaseException as error:  # the waiting caller gets the error, and the worker ends as it would have
                future.set_exception(error)
                raise
            return ()

        self.post(command)
        return await asyncio.wrap_future(future)

    async def set_paused(self, paused: bool, *, retract: bool = False) -> None:
        """Run steps only while not paused."""

        def between_steps(core: Core) -> None:
            self._paused = paused
            if retract:
                core.retract()

        await self.call(between_steps)

    def _run(self) -> None:
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(self._num_threads)
        try:
            while self._obey():
                if self._core.busy and not self._paused:
                    self._deliver(self._core.step())
        finally:
            for job in self._core.jobs():
                self._deliver(self._core.abort(job, "The engine is stopping."))
            self._loop.call_soon_threadsafe(self._on_end)

    def _obey(self) -> bool:
        """Run the queued commands; wait for one when there is nothing to compute. False after `stop`."""
        block = self._paused or not self._core.busy
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._deliver(command(self._core))
            block = False

    def _deliver(self, outputs: Iterable[Output]) -> None:
        batch = list(outputs)
        if batch:
            self._handed_over.clear()
            self._loop.call_soon_threadsafe(self._push, batch)
            # Without this the next step may hold the interpreter while the tokens wait for the event loop's turn.
            self._handed_over.wait(_HAND_OVER_S)

    def _push(self, batch: list[Output]) -> None:
        for job, delta in batch:
            job.sink.push(delta)
        self._handed_over.set()
