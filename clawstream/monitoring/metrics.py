"""The report in Prometheus's text format.

All are gauges, over the last whole minute and the last hour, since a restart counts the hour again. An absent value
gives no line.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from clawstream.monitoring.live import MonitorReport, TimeSpan


def _turns(stretch: TimeSpan) -> Mapping[str, int]:
    return {"paired": stretch.tally.turns_paired, "orphaned": stretch.tally.turns_orphaned}


def _samples(stretch: TimeSpan) -> Mapping[str, int]:
    return {"assembled": stretch.tally.samples, **stretch.tally.refusals}


Values = Mapping[tuple[str, ...], float | None]

_BY_STRETCH: Mapping[str, tuple[str, Callable[[TimeSpan], float | None]]] = {
    "output_tokens_per_second": ("Sampled tokens", lambda stretch: stretch.tokens_per_s),
    "mean_score": ("Of the verdicts that have a score", lambda stretch: stretch.tally.mean_score),
    "votes_unreadable_share": ("Of the judges' replies", lambda stretch: stretch.tally.unreadable_share),
    "votes_failed_share": ("Votes without a reply, of all", lambda stretch: stretch.tally.failed_share),
    "steps": ("Optimizer steps", lambda stretch: stretch.tally.steps),
    "steps_rejected": ("Steps whose outcome was not published", lambda stretch: stretch.tally.steps_rejected),
    "activations": ("Versions taken over by engines", lambda stretch: stretch.tally.activations),
    "rejections": ("Versions refused by engines", lambda stretch: stretch.tally.rejections),
    "pause_ms_max": ("The longest pause of an engine for new weights", lambda stretch: stretch.tally.pause_ms_max),
    "undecodable_records": ("Records that are no event", lambda stretch: stretch.tally.undecodable),
}
_BY_KIND: Mapping[str, tuple[str, str, Callable[[TimeSpan], Mapping[str, int]]]] = {
    "exchanges": ("outcome", "Exchanges by what came of them", lambda stretch: stretch.tally.exchanges),
    "turns": ("outcome", "Answers by whether they came back", _turns),
    "votes": ("status", "Judges' votes", lambda stretch: stretch.tally.votes),
    "samples": ("outcome", "Samples made, and why others were not", _samples),
    "answers_anew": ("outcome", "What came of answers given anew, by hint", lambda stretch: stretch.tally.anew),
}


def exposition(report: MonitorReport) -> bytes:
    """Return the text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_ReportCollector(report))
    return generate_latest(registry)


class _ReportCollector(Collector):
    def __init__(self, report: MonitorReport) -> None:
        self._report = report

    def collect(self) -> Iterator[GaugeMetricFamily]:
        report = self._report
        stretches = {"1m": report.minutes[-2], "60m": report.hour}
        for name, (words, value_of) in _BY_STRETCH.items():
            values: Values = {(window,): value_of(stretch) for window, stretch in stretches.items()}
            yield _family(f"window_{name}", words, ("window",), values)
        for name, (label, words, counts_of) in _BY_KIND.items():
            counts: Values = {
                (window, kind): count
                for window, stretch in stretches.items()
                for kind, count in counts_of(stretch).items()
            }
            yield _family(f"window_{name}", words, ("window", label), counts)
        yield _family("samples_waiting", "Samples in no batch yet", (), {(): report.samples_waiting})
        yield _family("samples_oldest_waiting_seconds", "Age of the oldest", (), {(): report.oldest_waiting_s})
        yield _family("policy_published_version", "The newest", (), {(): report.published_version})
        stands_still: Values = {(): int(report.alarm is not None)}
        yield _family("learning_stands_still", "1 where it does; /windows says why", (), stands_still)
        off_s: Values = {(): None if report.clock_off_ms is None else report.clock_off_ms / 1000}
        yield _family("broker_clock_off_seconds", "Ahead, or behind where negative; 0 where it is believed", (), off_s)
        active: Values = {(engine,): version for engine, version in report.active_versions.items()}
        yield _family("policy_active_version", "What each engine serves", ("engine",), active)
        yield _family("monitor_rebuilt", "1 once the last hour was read", (), {(): int(report.rebuilt)})


def _family(name: str, words: str, labels: tuple[str, ...], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"clawstream_{name}", words, labels=labels)
    for of, value in values.items():
        if value is not None:
            family.add_metric(of, value)
    return family
