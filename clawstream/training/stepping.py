"""Executes plans, one after the other; in one process, or in all of a team's.

A plan that is executed again gives the same bytes on the same machine. If the log already has the step's outcome, its
figures are taken from there, and the gate does not check the step again.
"""

import logging
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from clawstream.config import TrainingSettings
from clawstream.errors import ConfigError, StepRefused, UnusableCheckpoint
from clawstream.events import BatchPlanned, SampleAssembled, StepRejected, StepTaken
from clawstream.inference.model_folder import base_in
from clawstream.inference.tinker_service import TinkerService
from clawstream.stream.stage import now_ms
from clawstream.training.base_folder import refuse_quantized, threads_for
from clawstream.training.batches.memory import Trial
from clawstream.training.batches.progress import rejection, step_taken
from clawstream.training.batches.trainable import ModelLimits, flaw, with_offer
from clawstream.training.checkpoints import Checkpoint, standing, write, write_state
from clawstream.training.megatron.shape import configuration, frequencies, refuse_uneven, shape_of, sizes_of
from clawstream.training.model import Model
from clawstream.training.processes import Processes, Ranks, Start, among_several
from clawstream.training.step.trainer import StepSummary, Trainer, load_options
from clawstream.training.tinker import TinkerTrainer

log = logging.getLogger(__name__)
_MEMBER = "clawstream.training.stepping"


_OF_THE_MACHINE = (
    "trainer", "processes", "tensor_parallel", "pipeline_parallel", "micro_batch_tokens",
    "gradient_checkpointing", "dtype", "gate",
)  # fmt: skip


def begin(state: dict[str, Any], base: Path, settings: TrainingSettings, device: str) -> None:
    """Make the trainer, in place of an earlier one, with this process' part of the base's model."""
    state.pop("trainer", None)  # memory may not hold two at once
    if (threads := threads_for(base)) is not None:
        torch.set_num_threads(threads)
    state["trainer"] = Trainer(base, settings, device=device, model=_model(base, settings, device))


def call(state: dict[str, Any], method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call the trainer's method; all processes return the same. A refusal is returned, so that the processes go on."""
    try:
        return getattr(state["trainer"], method)(*args, **options)
    except StepRefused as why:
        return why


def _model(base: Path, settings: TrainingSettings, device: str) -> Model:
    options = load_options(settings, device)
    if settings.trainer == "torch":
        from clawstream.training.fsdp_model import FsdpModel

        return FsdpModel.load(base, **options)
    from clawstream.training.megatron.model import MegatronModel, join
    from clawstream.training.megatron.shape import sizes_of

    sizes = sizes_of(settings)
    join(sizes)
    return MegatronModel.load(base, sizes, **options)


class Team:
    """The processes of a trainer; each holds a part of the policy, its moments and its reference.

    All methods raise PartUnavailable where a process ended; then all processes are ended, and nothing more can be
    asked.
    """

    def __init__(
        self, base: Path, settings: TrainingSettings, *, device: str, processes: Processes | Ranks | None = None
    ) -> None:
        """Start the trainer in `processes`, or in new ones; on the `device` "cuda" each has a GPU of its own."""
        start = Start(backend="nccl" if device == "cuda" else "gloo")
        self._processes = processes or Processes(settings.processes, start)
        self._processes.ask(f"{_MEMBER}:begin", base, settings, device)

    def update(self, samples: Sequence[SampleAssembled], **options: Any) -> StepSummary:
        """Take the steps of a version, as `Trainer.update` does with these options; StepRefused ends no process."""
        outcome: StepSummary | StepRefused = self._call("update", tuple(samples), **options)
        if isinstance(outcome, StepRefused):
            raise outcome
        return outcome

    def choose_hints(self, samples: Sequence[SampleAssembled]) -> tuple[int, ...]:
        """Return for each sample the number of the offered hint to train on, as `Trainer.choose_hints` does."""
        chosen: tuple[int, ...] = self._call("choose_hints", tuple(samples))
        return chosen

    def save(self, folder: Path) -> None:
        """Write what engines load."""
        self._call("save", folder)

    def save_state(self, folder: Path) -> None:
        """Write what `restore` needs beside the weights, in any number of processes."""
        self._call("save_state", folder)

    def settle(self, folder: Path) -> None:
        """Take over the weights that are published wherever those that were trained round to others."""
        self._call("settle", folder)

    def restore(self, folder: Path | None) -> None:
        """Go on from a checkpoint of this policy, whichever trainer wrote it; None: from its start."""
        self._call("restore", folder)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return self._processes.ask(f"{_MEMBER}:call", method, args, options)[0]

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


class Stepper:
    """Holds a trainer, of one policy or in turn of several on one base; keeps it while the settings stay the same."""

    def __init__(
        self, base: Path, limits: ModelLimits, *, machine: TrainingSettings | None = None,
        service: TinkerService | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """`machine` says how this machine computes; None: each plan's own settings are used. `service` trains where the
        settings say that a service does; `ranks` are the processes of a team, where they are there already.
        """
        self._base = base
        self._ranks = ranks
        self._service = service
        self._machine = machine
        self._limits = limits
        self._team: Team | None = None  # while its processes run
        # The settings, the policy and version that the trainer holds (None: no step may begin there), the trainer.
        self._trainer: tuple[TrainingSettings, tuple[str, int] | None, Trainer | Team] | None = None

    def execute(
        self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...], *, parent: Path | None, versions: Path,
        recorded: StepTaken | None, rejected: Collection[int] = (), trials: Sequence[Trial] = (),
        held: Collection[str] = (),
    ) -> Checkpoint | StepRejected:  # fmt: skip
        """Take the plan's step on these samples; return its checkpoint, complete in `versions`, or the step's
        rejection. A checkpoint can be served, and has no state to go on from before `keep`.

        A version that is whole in `versions` already is in use, and stays as it is. Samples that no step can be taken
        on are left out; only plans by older releases name such. `parent` is the verified folder of the parent version;
        None: the parent is the base. `recorded` is the step as it stands on the log, `rejected` the earlier versions
        that were never published. `trials` and the ids of `held` hints are for a new step; both come from the hint
        memory.
        """
        started_s = time.perf_counter()
        in_use = standing(versions, plan.policy_version)
        if in_use is not None:
            _refuse_other_plan(in_use, plan)
        settings = self._settings_of(plan, recorded=recorded is not None)
        trainer = self._trainer_for(settings, (plan.policy_id, plan.parent_version), parent)
        self._trainer = None  # until the step is kept or rejected: if it fails, the weights are unknown
        usable = self._usable(plan, samples)
        try:
            update = trainer.update(
                usable, version=plan.policy_version, seed=plan.seed, gated=settings.gate and recorded is None,
                num_rejected=plan.policy_version - plan.parent_version - 1, advantages=_advantages(plan, usable),
                trials=self._usable_trials(trials, usable), held=held,
            )  # fmt: skip
        except StepRefused as why:
            self._trainer = (settings, None, trainer)
            return rejection(plan, str(why), step_ms=_ms_since(started_s), now_ms=now_ms())
        step_ms = _ms_since(started_s)
        step = recorded or step_taken(plan, usable, update, rejected=rejected, step_ms=step_ms, now_ms=now_ms())
        if in_use is not None:
            trainer.settle(in_use.path)
        checkpoint = in_use or write(versions, plan, step, trainer.save)
        self._trainer = (settings, None if in_use else (plan.policy_id, plan.policy_version), trainer)
        return checkpoint

    def keep(self, checkpoint: Checkpoint) -> None:
        """Write, beside the weights, the state that training goes on from after the step that was just executed."""
        assert self._trainer is not None, "nothing was executed"
        write_state(checkpoint.path, self._trainer[2].save_state)

    def choose(
        self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...], *, parent: Path | None, recorded: bool
    ) -> tuple[SampleAssembled, ...]:
        """Return the plan's samples, each with the one hint that its step trains on; `parent` as for `execute`.

        `recorded` says that the step stands on the log. The choice follows from plan and parent, so it is the
        same where a plan is executed again. A hint is not chosen if no step can be taken on its prompt.
        """
        settings = self._settings_of(plan, recorded=recorded)
        readable = [self._readable(sample) for sample in samples]
        if not settings.chooses_hints or not any(sample.other_hints for sample in readable):
            return tuple(with_offer(sample, 0) for sample in samples)
        trainer = self._trainer_for(settings, (plan.policy_id, plan.parent_version), parent)
        self._trainer = None  # until it has answered
        numbers = trainer.choose_hints(readable)
        self._trainer = (settings, (plan.policy_id, plan.parent_version), trainer)
        log.info(
            "hints_chosen policy=%s version=%d rule=%s of_several=%d not_the_longest=%d",
            plan.policy_id, plan.policy_version, settings.hint_choice,
            sum(bool(sample.other_hints) for sample in readable), sum(map(bool, numbers)),
        )  # fmt: skip
        return tuple(with_offer(sample, number) for sample, number in zip(readable, numbers, strict=True))

    def _readable(self, sample: SampleAssembled) -> SampleAssembled:
        """Return the sample without those of its other hints on whose prompts no step can be taken."""
        others = [other for number, other in enumerate(sample.other_hints, 1) if self._fits(sample, number)]
        return replace(sample, other_hints=tuple(others) if self._fits(sample, 0) else ())

    def _fits(self, sample: SampleAssembled, number: int) -> bool:
        return flaw(with_offer(sample, number), self._limits) is None

    def close(self) -> None:
        """End the trainer's processes, where it has any."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def _settings_of(self, plan: BatchPlanned, *, recorded: bool) -> TrainingSettings:
        """Return the settings of the plan; for a new step, this machine's own where they say how it computes."""
        settings = TrainingSettings.model_validate_json(plan.settings)
        if recorded or self._machine is None:
            return settings
        here = {name: getattr(self._machine, name) for name in _OF_THE_MACHINE}
        others = {name: value for name, value in here.items() if value != getattr(settings, name)}
        if others:
            log.warning(
                "version=%d planned_with=%s taken_with=%s reason=the trainer's settings changed between the plan and "
                "its step; the log keeps the plan's",
                plan.policy_version, {name: getattr(settings, name) for name in others}, others,
            )  # fmt: skip
        return settings.model_copy(update=others)

    def _usable(self, plan: BatchPlanned, samples: Sequence[SampleAssembled]) -> list[SampleAssembled]:
        usable = [sample for sample in samples if flaw(sample, self._limits) is None]
        if len(usable) < len(samples):
            log.warning(
                "version=%d samples_left_out=%d reason=the plan names samples that no step can be taken on; see "
                "`clawstream dlq list --stage train`",
                plan.policy_version, len(samples) - len(usable),
            )  # fmt: skip
        return usable

    def _usable_trials(self, trials: Sequence[Trial], samples: Sequence[SampleAssembled]) -> list[Trial]:
        """Return the trials of these samples that the model's context has room for with the hint."""
        by_id = {sample.sample_id: sample for sample in samples}
        return [
            trial
            for trial in trials
            if (sample := by_id.get(trial.sample_id)) is not None
            and flaw(replace(sample, hinted_prompt_ids=trial.hinted_prompt_ids), self._limits) is None
        ]

    def _trainer_for(self, training: TrainingSettings, version: tuple[str, int], parent: Path | None) -> Trainer | Team:
        if self._trainer is not None and self._trainer[:2] == (training, version):
            return self._trainer[2]
        if self._trainer is not None and self._trainer[0] == training:
            self._trainer[2].restore(parent)
            return self._trainer[2]
        self._trainer = None  # memory may not hold two trainers at once
        self.close()
        if (threads := threads_for(self._base)) is not None:
            torch.set_num_threads(threads)
        trainer = _start(self._base, training, self._service, self._ranks)
        if isinstance(trainer, Team):
            self._team = trainer
        if parent is not None:
            trainer.restore(parent)
        return trainer


def _refuse_other_plan(in_use: Checkpoint, plan: BatchPlanned) -> None:
    if in_use.plan != plan:
        raise UnusableCheckpoint(
            f"checkpoint {in_use.path}: its step was on {len(in_use.plan.sample_ids)} samples by another plan than "
            f"that of version {plan.policy_version} on the log: this is not the log that it was made from. Nothing is "
            "trained. Restore the log, or move the folder away"
        )


def _advantages(plan: BatchPlanned, samples: Sequence[SampleAssembled]) -> tuple[float, ...] | None:
    if plan.advantages is None:
        return None
    by_id = dict(zip(plan.sample_ids, plan.advantages, strict=True))
    return tuple(by_id[sample.sample_id] for sample in samples)


def _ms_since(started_s: float) -> int:
    return round((time.perf_counter() - started_s) * 1000)


def refuse_what_cannot_be(base: Path, training: TrainingSettings) -> None:
    """Raise ConfigError where the base is quantized, or the settings' trainer can't train it on this machine."""
    if training.by_service:
        return  # it has the weights
    refuse_quantized(base)
    if training.is_alone:
        return
    device_of(training, _device())
    if training.trainer == "megatron":
        config = configuration(base)
        refuse_uneven(base, shape_of(base, config), sizes_of(training))
        frequencies(base, config)
    else:
        from clawstream.training.fsdp_model import refuse_what_is_not_cut

        refuse_what_is_not_cut(base, adapter=training.lora_rank is not None)


def refuse_unlike_machines(ranks: Ranks, base: Path, versions: Path, cache_dir: Path) -> None:
    """Raise ConfigError where a process' machine has another base, or no access to the folder of versions."""
    text = uuid4().hex
    mark = versions / f".all-machines-{text}"
    try:
        mark.write_text(text)
        expected = (text, base_in(base, cache_dir).model_sha256)
        problems = [found for found in ranks.ask(f"{_MEMBER}:unlike", base, mark, cache_dir, expected) if found]
    finally:
        mark.unlink(missing_ok=True)
    if problems:
        raise ConfigError(f"{problems[0]}. Nothing is trained")


def unlike(
    _state: dict[str, Any], base: Path, mark: Path, cache_dir: Path, expected: tuple[str, str | None]
) -> str | None:
    """Return what this machine has that the first one has not; None where there is nothing."""
    host = socket.gethostname()
    try:
        same_folder = mark.read_text() == expected[0]
    except OSError:
        same_folder = False
    if not same_folder:
        return (
            f"{host} does not see what the trainer's first machine writes to {mark.parent}. All of them write versions "
            "there, each its own shards: mount one folder on all, and name it in training.save_dir"
        )
    if os.environ.get("LOCAL_RANK") != "0":  # one on each machine looks
        return None
    try:
        found = base_in(base, cache_dir).model_sha256
    except ConfigError as error:
        return f"on {host} {error}"
    return None if found == expected[1] else f"{host} has another model in {base} than the trainer's first machine"


def _start(
    base: Path, training: TrainingSettings, service: TinkerService | None, ranks: Ranks | None
) -> Trainer | Team:
    if training.by_service:
        if service is None:
            raise ConfigError(
                'the plan\'s training.trainer is "tinker", and the settings name another. Nothing is trained. Set it '
                "again, or give the new policy an id of its own"
            )
        return TinkerTrainer(base, training, service)
    if ranks is not None:  # also of a plan that was made for another number
        training = training.model_copy(update={"processes": ranks.count})
    device = _device()
    if training.is_alone:
        return Trainer(base, training, device=device)
    return Team(base, training, device=device_of(training, device), processes=ranks)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_of(settings: TrainingSettings, named: str) -> str:
    """Return the team's device, given the one that a single process would use; raises ConfigError if there is none."""
    if settings.trainer == "megatron" and find_spec("megatron") is None:
        raise ConfigError(
            'training.trainer = "megatron" needs megatron-core, which is not installed. Nothing is trained. Install '
            "clawstream with its extra megatron."
        )
    if named == "cpu":
        if settings.trainer == "megatron":
            raise ConfigError(
                'training.trainer = "megatron" needs a GPU for each of its processes, and torch sees none here. '
                'Nothing is trained. Take "torch", which needs none.'
            )
        return "cpu"
    if settings.processes > torch.cuda.device_count() and not among_several():
        raise ConfigError(
            f"training.processes = {settings.processes}, and torch sees {torch.cuda.device_count()} GPUs. Nothing is "
            "trained. Take as many processes as GPUs, or fewer."
        )
    return "cuda"
