"""Refuses runs in which people, or what they want, could not change at the update that was asked for."""

from clawstream.errors import ConfigError


def refuse_blocks(scenario: str, updates: int, *, hurry: bool, answers: int) -> None:
    """Raise ConfigError where people come one after the other and could not change at the end of a given update."""
    from clawstream.simulation.runs.scenarios import CASTS

    cast = CASTS[scenario]
    if not cast.talkers:
        return
    if not cast.unrelated_updates and updates % len(cast.talkers):
        raise ConfigError(
            f"--updates {updates}: --scenario {scenario} has {len(cast.talkers)} blocks, all equally long. Nothing was "
            f"run. Name a multiple of {len(cast.talkers)}"
        )
    options = (("--hurry", hurry), (f"--answers-per-hint {answers}", answers > 1))
    if said := [option for option, is_said in options if is_said]:
        raise ConfigError(
            f"{', '.join(said)}: with --scenario {scenario} the next people come after a given update, and this option "
            "lets the policy pass that update before they come. Nothing was run. Leave it out"
        )


def refuse_flip(after: int | None, scenario: str, *, updates: int, hurry: bool, controls: str, answers: int) -> None:
    """Raise ConfigError where nobody could change their mind after that update, or the change could not be measured."""
    if after is None:
        return
    if scenario != "all":
        raise ConfigError(
            f"--flip-after {after}: with --scenario {scenario} there is nobody to exchange wishes with. Nothing "
            "was run. Take --scenario all"
        )
    if hurry:
        raise ConfigError(
            f"--flip-after {after}: people who ask on all the time do not all change their minds between "
            "two updates. Nothing was run. Leave out --hurry"
        )
    if after >= updates:
        raise ConfigError(
            f"--flip-after {after}: there are {updates} updates. Nothing was run. Name one before the last"
        )
    if answers > 1:
        raise ConfigError(
            f"--flip-after {after}: with --answers-per-hint {answers} a session gives several samples, and update "
            f"{after} may be passed before anybody's wish changes. Nothing was run. Leave one of them out"
        )
    if controls:
        raise ConfigError(
            f"--flip-after {after}: --controls {controls} is compared with its method at the last update, and the "
            "method may not have learned the new wishes by then. Nothing was run. Run controls without a flip"
        )
