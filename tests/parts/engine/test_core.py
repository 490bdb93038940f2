"""The engine's arithmetic against plain transformers: what rows, batches, chunks and reuse must not change."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from clawstream.errors import PartUnavailable, UnusableCheckpoint
from clawstream.inference.dialect import Call, TokenDelta
from clawstream.inference.engine import GenerateRequest, SamplingParams
from clawstream.local.engine import core as core_module
from clawstream.local.engine import model as attention
from clawstream.local.engine.core import Core
from clawstream.local.engine.model import RowModel, split_long_rows
from clawstream.local.engine.rows import Job
from tests.examples import examples
from tests.parts.engine.tiny_model import make_model

VOCABULARY = 200
_ids = itertools.count()


class Heard:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def push(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [value for delta in self.deltas for value in delta.logprobs if value is not None]


@pytest.fixture(scope="module")
def row_model(models: tuple[Path, Path]) -> RowModel:
    torch.set_num_threads(1)
    return RowModel(str(models[0]))


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> tuple[Any, Any]:
    """Both models as transformers runs them."""
    loaded = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models]
    return loaded[0], loaded[1]


@pytest.fixture
def core(row_model: RowModel, models: tuple[Path, Path]) -> Core:
    row_model.apply(row_model.read_weights(str(models[0])))
    return Core(row_model, num_rows=4, version="1", decode=None)


def ask(
    core: Core,
    prompt: Sequence[int],
    num_new: int,
    *,
    temperature: float = 0.0,
    logprob_start: int | None = None,
    extra_key: str | None = None,
    lora_name: str | None = None,
) -> tuple[Job, Heard]:
    """A job that the core has, and what will be heard of it."""
    heard = Heard()
    sampling = SamplingParams(max_new_tokens=num_new, temperature=temperature, sampling_seed=1)
    request = GenerateRequest(input_ids=list(prompt), sampling=sampling, extra_key=extra_key, lora_name=lora_name)
    call = Call(rid=str(next(_ids)), request=request, return_logprob=True, logprob_start=logprob_start)
    job = Job(
        call=call,
        sink=heard,
        seed=1,
        stop_ids=frozenset(),
        tokens=list(prompt),
        num_prompt=len(prompt),
        prompt=np.array(prompt, dtype=np.int32),
    )
    core.submit(job)
    return job, heard


def test_nobody_waits_for_a_long_prompt(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "IDLE_PREFILL_TOKENS", 256)
    monkeypatch.setattr(core_module, "BUSY_PREFILL_TOKENS", 256)
    long_job, _ = ask(core, [token % VOCABULARY for token in range(1900)], 1)
    step(core)
    assert 0 < long_job.num_computed < 1900
    _, short = ask(core, [5, 6, 7], 3)
    for _ in range(3):
        step(core)
    assert len(short.token_ids) == 3
    before = long_job.num_computed
    assert 256 < before < 1900
    run(core)
    assert long_job.finished


def test_a_step_computes_few_tokens_of_what_is_already_long(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "IDLE_PREFILL_PAIRS", 2**16)
    job, heard = ask(core, [token % VOCABULARY for token in range(1900)], 1)
    pieces = []
    while not job.finished:
        before = job.num_computed
        step(core)
        pieces.append((before, job.num_computed - before))
    assert pieces[0] == (0, 256)
    assert all(count * (past + count) <= 2**16 for past, count in pieces)
    assert len(heard.token_ids) == 1


def test_between_two_tokens_of_others_a_long_prompt_is_read_in_smaller_pieces(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "BUSY_PREFILL_TOKENS", 64)
    monkeypatch.setattr(core_module, "BUSY_PREFILL_PAIRS", 2**15)
    _, heard = ask(core, [5, 6, 7], 200)
    step(core)
    job, _ = ask(core, [token % VOCABULARY for token in range(1900)], 1)
    while not job.finished:
        before, said = job.num_computed, len(heard.token_ids)
        step(core)
        count = job.num_computed - before
        assert count <= 64
        assert count * (before + count) <= 2**15
        assert len(heard.token_ids) == said + 1


def step(core: Core) -> None:
    for job, delta in core.step():
        job.sink.push(delta)


def run(core: Core) -> None:
    while core.busy:
        step(core)


@torch.inference_mode()
def logprobs_of(model: Any, tokens: Sequence[int], start: int) -> list[float]:
    """What transformers gives tokens[start:], each after all tokens before it."""
    logits = model(input_ids=torch.tensor([list(tokens)])).logits[0, start - 1 : -1]
    picked = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[start:]).unsqueeze(1))
    return picked.squeeze(1).tolist()


prompts = st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=40)
# A family of prompts that begin alike, so that rows are shared.
families = st.tuples(st.lists(st.integers(0, VOCABULARY), min_size=20, max_size=40), prompts)


@examples(0.25)
@given(
    asked=st.lists(st.tuples(families, st.booleans(), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=9),
    budget=st.integers(3, 64),
    call_cost_keys=st.sampled_from([0, 2048]),
)
def test_any_schedule_of_requests_gives_each_the_logprobs_of_plain_transformers(
    row_model: RowModel,
    plain: tuple[Any, Any],
    asked: list[tuple[tuple[list[int], list[int]], bool, int, int]],
    budget: int,
    call_cost_keys: int,
) -> None:
    stem = asked[0][0][0]
    core = Core(row_model, num_rows=3, version="1", decode=None)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_CALL_COST_KEYS", call_cost_keys)
        patch.setattr(core_module, "BUSY_PREFILL_TOKENS", budget)
        patch.setattr(core_module, "IDLE_PREFILL_TOKENS", budget)
        for (_, tail), shares, num_new, num_steps in asked:
            prompt = (stem if shares else []) + tail
            told.append((prompt, *ask(core, prompt, num_new, temperature=1.0)))
            for _ in range(num_steps):
                step(core)
        run(core)
    for prompt, job, heard in told:
        assert len(heard.token_ids) == job.max_new_tokens
        expected = logprobs_of(plain[0], prompt + heard.token_ids, len(prompt))
        assert heard.logprobs == pytest.approx(expected, abs=2e-4)


def test_greedy_answers_are_those_of_transformers_generate(core: Core, plain: tuple[Any, Any]) -> None:
    asked = [list(range(start, start + 5 * start % 60 + 3)) for start in range(1, 8)]
    told = [ask(core, prompt, 20)[1] for prompt in asked]
    run(core)
    for prompt, heard in zip(asked, told, strict=True):
        ids = torch.tensor([prompt])
        generated = plain[0].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert heard.token_ids == generated[0, len(prompt) :].tolist()


def test_prompt_scored_in_pieces_equals_transformers(
    core: Core, plain: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "_SCORED_LOGITS", 1)
    prompt = [(7 * i) % VOCABULARY for i in range(150)]
    _, heard = ask(core, prompt, 0, logprob_start=10)
    run(core)
    entries = heard.deltas[0].input_logprobs
    assert [token for _, token, _ in entries] == prompt[10:]
    assert entries[0][0] is None
    assert [value for value, _, _ in entries[1:]] == pytest.approx(logprobs_of(plain[0], prompt, 11), abs=2e-4)


def test_prompt_half_scored_when_it_is_retracted_is_scored_once(
    core: Core, plain: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "_SCORED_LOGITS", 1)
    prompt = [(7 * i) % VOCABULARY for i in range(100)]
    _, heard = ask(core, prompt, 0, logprob_start=0)
    step(core)
    core.retract()
    run(core)
    values = [value for value, _, _ in heard.deltas[0].input_logprobs[1:]]
    assert values == pytest.approx(logprobs_of(plain[0], prompt, 1), abs=2e-4)


def test_cache_grows_under_running_requests_without_changing_them(core: Core, plain: tuple[Any, Any]) -> None:
    short = list(range(30))
    _, early = ask(core, short, 40, temperature=1.0)
    step(core)
    long = [(11 * i) % VOCABULARY for i in range(1500)]
    _, late = ask(core, long, 20, temperature=1.0)
    run(core)
    for prompt, heard in ((short, early), (long, late)):
        expected = logprobs_of(plain[0], prompt + heard.token_ids, len(prompt))
        assert heard.logprobs == pytest.approx(expected, abs=5e-4)


def test_prefix_is_reused_under_the_same_key_only(core: Core) -> None:
    prompt = list(range(60))
    ask(core, prompt, 1, extra_key="1")
    run(core)
    other, _ = ask(core, [*prompt, 3], 1, extra_key="2")
    again, _ = ask(core, [*prompt, 3], 1, extra_key="1")
    third, _ = ask(core, [*prompt, 3], 1, extra_key="3")
    run(core)
    assert third.cached_tokens == 0
    assert again.cached_tokens >= 59
    assert other.cached_tokens == 0


def test_new_request_after_a_swap_reuses_nothing_and_answers_as_the_new_weights_do(
    core: Core, row_model: RowModel, models: tuple[Path, Path], plain: tuple[Any, Any]
) -> None:
    prompt = list(range(60))
    ask(core, prompt, 4, extra_key="same")
    _, running = ask(core, prompt, 30, temperature=1.0, extra_key="same")
    for _ in range(6):
        step(core)
    core.swap_weights(row_model.read_weights(str(models[1])), "2")
    fresh, heard = ask(core, prompt, 8, temperature=1.0, extra_key="same")
    run(core)
    late, _ = ask(core, prompt, 1, extra_key="same")
    run(core)
    assert fresh.cached_tokens == 0
    assert late.cached_tokens > 0
    assert heard.logprobs == pytest.approx(logprobs_of(plain[1], prompt + heard.token_ids, 60), abs=2e-4)
    assert [span.version for span in running.deltas[-1].weight_versions] == ["1", "2"]
    assert sum(span.num_tokens for span in running.deltas[-1].weight_versions) == 30


def test_running_request_keeps_its_own_cache_across_a_swap(
    core: Core, row_model: RowModel, models: tuple[Path, Path], plain: tuple[Any, Any]
) -> None:
    prompt = list(range(60))
    _, heard = ask(core, prompt, 12, temperature=1.0)
    for _ in range(6):
        step(core)
    core.swap_weights(row_model.read_weights(str(models[1])), "2")
    run(core)
    recomputed = logprobs_of(plain[1], prompt + heard.token_ids, 60)
    assert heard.logprobs[:6] == pytest.approx(logprobs_of(plain[0], prompt + heard.token_ids[:6], 60), abs=2e-4)
    assert heard.logprobs[6:] != pytest.approx(recomputed[6:], abs=2e-4)


def test_retracted_request_goes_on_as_if_the_new_weights_had_read_it_all(
    core: Core, row_model: RowModel, models: tuple[Path, Path], plain: tuple[Any, Any]
) -> None:
    prompt = list(range(60))
    _, heard = ask(core, prompt, 12, temperature=1.0)
    for _ in range(6):
        step(core)
    core.retract()
    core.swap_weights(row_model.read_weights(str(models[1])), "2")
    run(core)
    recomputed = logprobs_of(plain[1], prompt + heard.token_ids, 60)
    assert heard.logprobs[6:] == pytest.approx(recomputed[6:], abs=2e-4)
    assert len(heard.token_ids) == 12


def test_aborted_request_frees_its_row_and_disturbs_no_other(core: Core, plain: tuple[Any, Any]) -> None:
    told = [(prompt, *ask(core, prompt, 20, temperature=1.0)) for prompt in ([i + 1, i + 2, i + 3] for i in range(6))]
    step(core)
    for _, job, _ in (told[1], told[5]):
        for _, delta in core.abort(job, "gone"):
            job.sink.push(delta)
    run(core)
    assert core.abort(told[1][1], "again") == []
    for index, (prompt, _, heard) in enumerate(told):
        if index in (1, 5):
            assert heard.deltas[-1].finish == {"type": "abort", "message": "gone"}
        else:
            expected = logprobs_of(plain[0], prompt + heard.token_ids, len(prompt))
            assert heard.logprobs == pytest.approx(expected, abs=2e-4)


def test_adapters_in_one_batch_equal_peft_each(core: Core, models: tuple[Path, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    paths, references = [], []
    for name in ("a", "b"):
        base = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
        config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        tuned = get_peft_model(base, config).eval()
        tuned.save_pretrained(tmp_path / name)
        paths.append(tmp_path / name)
        references.append(tuned)
    for name, path in zip("ab", paths, strict=True):
        core.adapters.add(name, core.adapters.read(str(path)))
    told = [ask(core, range(20), 10, temperature=1.0, lora_name=name)[1] for name in ("a", None, "b", "a")]
    run(core)
    base = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    for heard, reference in zip(told, [references[0], base, references[1], references[0]], strict=True):
        expected = logprobs_of(reference, [*range(20), *heard.token_ids], 20)
        assert heard.logprobs == pytest.approx(expected, abs=2e-4)
    core.adapters.remove("a")
    core.adapters.remove("b")


def test_adapter_of_another_model_is_refused(core: Core, tmp_path: Path) -> None:
    with pytest.raises(UnusableCheckpoint, match="can't be read"):
        core.adapters.read(str(tmp_path))


def test_checkpoint_cut_short_is_refused_before_any_weight_changes(
    row_model: RowModel, models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes((models[1] / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(UnusableCheckpoint, match="the weights in use stay"):
        row_model.read_weights(str(tmp_path))


@pytest.mark.parametrize("window", [4, 512])
def test_a_model_whose_layers_see_a_window_is_refused_however_long_the_window_is(tmp_path: Path, window: int) -> None:
    make_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PartUnavailable, match=f"can't run over rows: its layers see {window} tokens alone"):
        RowModel(str(tmp_path))


def test_folder_without_a_model_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(PartUnavailable, match="not a causal language model"):
        RowModel(str(tmp_path))


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=40))
def test_long_rows_are_split_off_only_where_that_reads_fewer_keys(lengths: list[int]) -> None:
    short_keys, long_rows = split_long_rows(lengths)
    rest = [length for row, length in enumerate(lengths) if row not in long_rows]
    assert short_keys == max(rest)
    assert all(lengths[row] >= short_keys for row in long_rows)
    read = short_keys * len(lengths) + sum(lengths[row] for row in long_rows)
    assert read <= max(lengths) * len(lengths)
