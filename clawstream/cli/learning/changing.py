"""Refuses runs whose people can't change when they should: who talks, or what is wanted."""

from clawstream.errors import ConfigError


def refuse_blocks(scenario: str, updates: int, *, hurry: bool, answers: int) -> None:
    """Raise ConfigError where the people of a scenario come one after the other, and no update would be between two."""
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
            f"{', '.join(said)}: with --scenario {scenario} the next people come after a certain update, which may be "
            "passed before. Nothing was run. Leave it out"
        )


def refuse_flip(after: int | None, scenario: str, *, updates: int, hurry: bool, controls: str, answers: int) -> None:
    """Raise ConfigError where nobody could change their mind after that update, or nothing would be told of it."""
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
            f"--flip-after {after}: --controls {controls} is held against its method at the last update, by when the "
            "method need not have learned anew. Nothing was run. Run controls without a flip"
        )
