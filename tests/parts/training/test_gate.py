"""The gate lets healthy steps pass and catches faults that are planted; what it decides by, by hand."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.events import SampleAssembled, VersionSpan, float32
from clawstream.events.exchanges import Sampling, Shaping
from clawstream.training import gating
from clawstream.training.gating import ends_of, write
from clawstream.training.publishing import (
    ALIKE_REWARDS,
    GateMemory,
    one_sided,
    stopped,
)
from clawstream.training.step.carried import Carried
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from tests.keeping import keep
from tests.parts.training import tiny
from tests.parts.training.planted import FAULTS, always_good

SETTINGS = TrainingSettings(learning_rate=3e-4)
BATCH = 16


def answered(trainer: Trainer, number: int) -> list[SampleAssembled]:
    """Sixteen answers by the policy itself, good where most of their tokens are of the lower half, hinted where not."""
    asked = [tiny.sample(f"{number}-{i}", response_tokens=12, hinted=True) for i in range(BATCH)]
    questions = [Suffix(s.prompt_ids, s.response_ids, 1.0) for s in asked]
    written = write(trainer._model, questions, limit_tokens=12, seed=number)
    assert written is not None
    suffixes = [q._replace(response_ids=a.token_ids) for q, a in zip(questions, written, strict=True)]
    logps = trainer._model.score(suffixes, weights=None, budget_tokens=4096)
    return [
        replace(
            sample,
            reward=1 if good else -1,
            total_reward=1.0 if good else -1.0,
            hinted_prompt_ids=None if good else sample.hinted_prompt_ids,
            response_ids=tuple(suffix.response_ids),
            response_logprobs=float32(logp.tolist()),
            trained=(1,) * 12,
            versions=(VersionSpan(policy_version=number - 1, num_tokens=12),),
        )
        for sample, suffix, logp in zip(asked, suffixes, logps, strict=True)
        for good in [sum(token < tiny.VOCABULARY // 2 for token in suffix.response_ids) >= 7]
    ]


@pytest.fixture(scope="module")
def learned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after four healthy steps."""
    trainer = Trainer(base, SETTINGS)
    for version in range(1, 5):
        trainer.update(answered(trainer, version), version=version, seed=version, gated=True)
    folder = tmp_path_factory.mktemp("learned")
    keep(trainer, folder)
    return folder


def of(base: Path, folder: Path, settings: TrainingSettings = SETTINGS) -> Trainer:
    trainer = Trainer(base, settings)
    trainer.restore(folder)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [SETTINGS.learning_rate, 1e-7])
def test_of_healthy_steps_at_most_one_in_twenty_is_rejected(base: Path, learning_rate: float) -> None:
    trainer = Trainer(base, SETTINGS.model_copy(update={"learning_rate": learning_rate}))
    rejected = 0
    for version in range(1, 41):
        try:
            trainer.update(answered(trainer, version), version=version, seed=version, gated=True)
        except StepRefused:
            rejected += 1
    assert rejected <= 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_at_its_first_step(base: Path, learned: Path, fault: str) -> None:
    trainer = of(base, learned)
    samples = answered(trainer, 5)
    FAULTS[fault](trainer)
    with pytest.raises(StepRefused):
        trainer.update(samples, version=5, seed=5, gated=True)


def test_a_gradient_that_leads_astray_is_caught_though_momentum_still_leads_the_right_way(
    base: Path, learned: Path
) -> None:
    trainer = of(base, learned)
    for moments in trainer._optimizer.state.values():
        moments["exp_avg"].mul_(30.0)
    samples = answered(trainer, 5)
    FAULTS["sign flipped"](trainer)
    with pytest.raises(StepRefused, match="the gradient leads away"):
        trainer.update(samples, version=5, seed=5, gated=True)


@pytest.mark.parametrize(("version", "written"), [(5, 0), (7, 0), (8, 1)])
def test_where_a_step_hardly_moves_the_policy_answers_are_written_every_fourth_version(
    base: Path, learned: Path, monkeypatch: pytest.MonkeyPatch, version: int, written: int
) -> None:
    asked: list[object] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return write(*arguments, **options)

    monkeypatch.setattr(gating, "write", noted)
    trainer = of(base, learned, SETTINGS.model_copy(update={"learning_rate": 1e-9}))
    trainer.update(answered(trainer, version), version=version, seed=5, gated=True)
    assert len(asked) == written


def test_a_token_whose_value_no_teacher_gave_says_nothing_of_where_a_step_may_lead(
    base: Path, learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(gating, "astray", lambda *arguments: found.extend(arguments[3]))
    trainer = of(base, learned)
    own = trainer._loss.score

    def with_holes(*arguments: Any, **options: Any) -> Any:
        scored = own(*arguments, **options)
        for values in scored.hinted.values():
            values[0] = math.nan
        return scored

    monkeypatch.setattr(trainer._loss, "score", with_holes)
    trainer.update(answered(trainer, 5), version=5, seed=5, gated=True)
    firsts = {way[0] for way in found if way is not None and len(set(way)) > 1}
    assert firsts == {0.0}


def test_a_judge_that_begins_to_say_yes_to_everything_is_caught_at_once(base: Path, learned: Path) -> None:
    trainer = of(base, learned)
    with pytest.raises(StepRefused, match="judge says yes to everything"):
        trainer.update(always_good(answered(trainer, 5)), version=5, seed=5, gated=True)


def test_a_policy_that_loops_is_caught_by_what_it_writes_alone(
    base: Path, learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for measured in ("harm", "astray"):
        monkeypatch.setattr(gating, measured, lambda *_, **__: None)
    trainer = of(base, learned)
    samples = answered(trainer, 5)
    FAULTS["loops"](trainer)
    with pytest.raises(StepRefused, match="8 of 8 answers after the step say one thing over and over"):
        trainer.update(samples, version=5, seed=5, gated=True)


def test_a_gate_changes_nothing_of_a_step_that_it_lets_pass(base: Path, learned: Path, tmp_path: Path) -> None:
    for name, gated in (("with", True), ("without", False)):
        trainer = of(base, learned)
        trainer.update(answered(trainer, 5), version=5, seed=5, gated=gated)
        keep(trainer, tmp_path / name)
    for file in (tmp_path / "with").rglob("*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "without" / file.relative_to(tmp_path / "with")).read_bytes()


def rewarded(*rewards: int, hinted: bool = False) -> list[SampleAssembled]:
    return [tiny.sample(f"r{i}", reward=reward, hinted=hinted) for i, reward in enumerate(rewards)]


def after(*rewards: int) -> GateMemory:
    return GateMemory().after(rewarded(*rewards))


def test_a_judge_is_seen_to_say_yes_to_everything_where_it_begins_suddenly_and_not_where_people_are_pleased() -> None:
    assert "6 of the 32" in (one_sided(rewarded(*[1] * 16), after(*[1, -1, -1, -1, -1] * 6, -1, -1)) or "")
    assert one_sided(rewarded(*[1] * 16), after(*[1, 1, -1] * 11)) is None
    assert one_sided(rewarded(*[1] * 15, -1), after(*[-1] * 32)) is None


def test_answers_that_were_cut_don_t_hide_a_judge_that_says_yes_to_everything() -> None:
    cut = [replace(sample, cut=True) for sample in rewarded(-1, -1)]
    assert "6 of the 32" in (
        one_sided([*rewarded(*[1] * 16), *cut], after(*[1, -1, -1, -1, -1] * 6, -1, -1).after(cut)) or ""
    )


def test_a_judge_whose_word_people_overrule_is_not_seen_to_say_yes_to_everything() -> None:
    overruled = [replace(sample, person_reward=-1.0, total_reward=-1.0) for sample in rewarded(*[1] * 16)]
    assert one_sided(overruled, after(*[1, -1, -1, -1, -1] * 6, -1, -1)) is None


def test_hints_for_answers_that_are_all_good_tell_on_the_judge() -> None:
    assert "there is a hint" in (one_sided(rewarded(*[1] * 12, hinted=True), GateMemory()) or "")
    assert one_sided(rewarded(*[1] * 12), GateMemory()) is None


def test_nothing_is_learned_from_rewards_that_never_differ() -> None:
    assert "nothing to learn" in (one_sided(rewarded(*[1] * 16), after(*[1] * (ALIKE_REWARDS - 16))) or "")
    assert one_sided(rewarded(*[1] * 15), after(*[1] * (ALIKE_REWARDS - 16))) is None
    assert one_sided(rewarded(*[1] * 16), after(*[1] * 130, -1)) is None


@pytest.mark.parametrize("hinted", [1, 2, 3])
def test_few_hints_in_each_batch_do_not_hide_a_judge_that_says_yes_to_everything(hinted: int) -> None:
    memory, batch = GateMemory(), [*rewarded(*[1] * (16 - hinted)), *rewarded(*[1] * hinted, hinted=True)]
    found = []
    for _ in range(10):
        found.append(one_sided(batch, memory))
        memory = memory.after(batch)
    assert found[-1] is not None
    assert found[0] is None  # a policy that people are pleased with has such batches


def test_where_hints_teach_good_answers_alone_are_something_to_learn_from() -> None:
    hinted_too = [*rewarded(*[1] * 15), tiny.sample("h", reward=None, hinted=True)]
    assert one_sided(hinted_too, after(*[1] * (ALIKE_REWARDS - 15))) is None
    rehearsed = [*hinted_too[:15], replace(hinted_too[15], hint_id="of old")]  # nobody said it now
    assert "nothing to learn" in (one_sided(rehearsed, after(*[1] * (ALIKE_REWARDS - 15))) or "")


@pytest.mark.parametrize("hinted", [True, False])
def test_thinking_is_to_move_as_much_as_it_counts(base: Path, hinted: bool) -> None:
    sample = replace(tiny.sample("s", reward=1, hinted=hinted), num_thinking=3)
    ways = []
    for weight in (1.0, 0.5):
        trainer = Trainer(base, SETTINGS.model_copy(update={"w_thinking": weight}))
        scored = trainer._score([sample], [0], None)
        gate = gating.Gate(
            trainer._model, trainer._settings, [sample], GateMemory(), scored=scored, mine=[0], num_rejected=0
        )
        ways += [way for way in gate._wanted if way is not None]
    whole, half = ways
    assert half == pytest.approx([*(much / 2 for much in whole[:3]), *whole[3:]])
    assert len(half) == len(sample.response_ids)


def test_a_gate_expects_of_a_hint_that_changes_nothing_no_move_unless_its_answer_was_scored(base: Path) -> None:
    """Far from the base, which says the same with the hint and without."""
    trainer = Trainer(base, SETTINGS.model_copy(update={"learning_rate": 1e-2}))
    for version in range(1, 4):
        trainer.update([tiny.sample("taught", reward=-1)], version=version, seed=0)
    for reward, moves in ((None, False), (-1, True)):
        plain = tiny.sample("taught", reward=reward)
        sample = replace(plain, hint="as ever", hinted_prompt_ids=plain.prompt_ids)
        gate = gating.Gate(
            trainer._model, trainer._settings, [sample], GateMemory(), scored=trainer._score([sample], [0], None),
            mine=[0], num_rejected=0,
        )  # fmt: skip
        [way] = gate._wanted
        assert way is not None
        assert any(way) is moves


def test_after_eight_rejections_in_a_row_the_judge_is_taken_as_it_is(base: Path) -> None:
    samples = [tiny.sample(f"s{i}", reward=1) for i in range(16)]
    for num_rejected, refused in ((7, True), (8, False)):
        trainer = Trainer(base, SETTINGS)
        trainer._carried = Carried(gate=after(*[-1] * 32))
        with pytest.raises(StepRefused) if refused else nullcontext():
            trainer.update(samples, version=9, seed=0, gated=True, num_rejected=num_rejected)


@pytest.mark.slow
def test_a_judge_that_is_taken_as_it_is_stays_so_until_it_says_no(base: Path, tmp_path: Path) -> None:
    trainer, told = Trainer(base, SETTINGS), ""
    for version, good in enumerate([1] * 20 + [-1] + [1] * 18, start=1):
        samples = [tiny.sample(f"v{version}-{i}", reward=good) for i in range(16)]
        rejected = len(told) - len(told.rstrip("R"))
        try:
            trainer.update(samples, version=version, seed=0, gated=True, num_rejected=rejected)
        except StepRefused:
            told += "R"
            trainer.restore(tmp_path / f"v{version - 1 - rejected}")
        else:
            told += "k"
            keep(trainer, tmp_path / f"v{version}")
    alike = ALIKE_REWARDS // 16
    assert told == "k" * alike + "R" * 8 + "k" * (20 - alike - 8) + "k" + "k" * alike + "R" * 8 + "k"


def test_answers_are_written_in_pieces_of_the_budget_and_each_for_its_question(base: Path) -> None:
    model = Trainer(base, SETTINGS)._model
    questions = [Suffix(tuple(range(1, 5 + 9 * n)), (0,), 1e-4) for n in range(4)]  # all but greedy
    told = [write(model, questions, limit_tokens=6, seed=1, budget_tokens=budget) for budget in (16, 4096)]
    alone = [write(model, [question], limit_tokens=6, seed=1) for question in questions]
    assert told[0] == told[1] == [answer for one in alone for answer in one or ()]


def test_an_answer_ends_where_a_configuration_of_several_parts_says(tmp_path: Path) -> None:
    Gemma3Config(text_config={"eos_token_id": [1, 106]}).save_pretrained(tmp_path)
    assert ends_of(tmp_path) == [1, 106]


def test_nothing_is_written_by_what_is_no_probability(base: Path) -> None:
    model = Trainer(base, SETTINGS)._model
    next(iter(model.trained.values())).data.fill_(float("nan"))
    assert write(model, [Suffix((1, 2), (0,), 1.0)], limit_tokens=6, seed=1) is None


def test_how_an_answer_would_have_ended_is_not_known_where_the_client_had_a_say_in_it() -> None:
    plain = tiny.sample("a")
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=9, seed=None, stop=("\n",))
    shaped = replace(sampling, stop=(), shaping=Shaping(min_new_tokens=3))
    told = [plain, *(replace(plain, sampling=one) for one in (sampling, shaped, replace(shaped, shaping=None)))]
    assert [stopped(sample) for sample in told] == [False, True, True, False]
    kept = GateMemory().after([replace(plain, sampling=sampling)])
    assert kept.canaries[0].stopped
    assert GateMemory.of(kept.plain()) == kept
