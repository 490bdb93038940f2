"""The stages that a replay hosts, set up by its first event and the settings."""

from collections.abc import Callable, Sequence
from typing import Any

from clawstream.config import JudgeSettings, Settings
from clawstream.conversation.continuing import Renderer
from clawstream.events import ReplayStarted, RewardWeights, VotesFrom
from clawstream.judging.heuristics_stage import heuristic_named, scored_again
from clawstream.judging.stage import Judge, aggregation, judging_stage
from clawstream.samples.joining import SampleRules, TeacherRule
from clawstream.samples.stage import samples_stage
from clawstream.stream.stage import Stage
from clawstream.turns.stage import turns_stage


def judge_settings(settings: JudgeSettings, started: ReplayStarted) -> JudgeSettings:
    """Return the settings with the values that the replay's first event holds."""
    return settings.model_copy(update={"votes": started.num_votes, "hint_quorum": started.hint_quorum or 1})


def hosted(
    settings: Settings, started: ReplayStarted, renderer: Renderer, judge: Judge | None
) -> tuple[Callable[[], Sequence[Stage[Any, Any]]], Stage[Any, Any] | None]:
    """Return the function that makes one partition's stages, and the judging stage where it asks `judge`."""
    section = judge_settings(settings.judge, started)
    asks = None if started.teacher is None else TeacherRule(started.teacher, waits=False)
    rules = SampleRules(
        renderer, started.off_distribution, started.reward_weights or RewardWeights(), asks=asks,
        grouped=settings.training.method == "stepwise", interrupted=settings.samples.interrupted,
    )  # fmt: skip
    scored_by = [] if started.heuristic_function is None else [heuristic_named(started.heuristic_function)]
    asking = None
    if started.votes_from is VotesFrom.NEW:
        assert judge is not None, f"replay {started.replay} asks a judge, and there is none"
        asking = judging_stage(section, judge)

    def stages() -> Sequence[Stage[Any, Any]]:
        turns: list[Stage[Any, Any]] = [turns_stage(), *map(scored_again, scored_by)]
        if asking is not None:
            return (*turns, asking, samples_stage(rules))
        # One judge may have voted long after another had finished with the session.
        return (*turns, aggregation(section, started.judge), samples_stage(rules, forgets=False))

    return stages, asking
