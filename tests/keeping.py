"""A trainer's checkpoint without a version's name: its weights, and its state beside them."""

from pathlib import Path

from clawstream.inference.model_folder import STATE_FOLDER
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import Team


def keep(trainer: Trainer | Team, folder: Path) -> Path:
    """Write what the trainer can be restored from; return the folder, which is made if it is not there."""
    state = folder / STATE_FOLDER
    state.mkdir(parents=True)
    trainer.save(folder)
    trainer.save_state(state)
    return folder
