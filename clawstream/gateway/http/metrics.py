"""The metrics of /metrics. No label ever holds a client's text."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Metrics:
    """One gateway's counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"clawstream_{name}", meaning, labels, registry=self.registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(f"clawstream_{name}", meaning, labels, registry=self.registry)

        def histogram(name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"clawstream_{name}", meaning, labels, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "Requests for answers, by how they ended.", "outcome")
        self.limited = counter(
            "requests_limited", "Requests refused by a limit: the gateway's, or a key's rate or concurrency.", "limit"
        )
        self.in_flight = gauge("requests_in_flight", "Requests being answered.")
        self.ttft_s = histogram("ttft_seconds", "From the request's headers to the answer's first token.", _LATENCY_S)
        self.rendering_s = histogram(
            "rendering_seconds", "Messages to prompt tokens, by how the prompt was made.", _SHORT_S, "made"
        )
        self.prompts = counter(
            "prompts",
            "Prompts by which earlier answers they hold as sampled: all (continued), the last (spliced), none, as none "
            "is known (rendered) or usable (fallback).",
            "made",
        )
        self.ack_wait_s = histogram(
            "ack_wait_seconds", "How long the end of an answer waited for Kafka or the spool.", _SHORT_S
        )
        self.spooled = counter("spooled_records", "Records put into the spool.")
        self.spool_s = histogram(
            "spool_append_seconds", "From a record's arrival at the spool to the end of its fsync.", _SHORT_S
        )
        self.spool_records = gauge("spool_records", "Records in the spool.")
        self.spool_bytes = gauge("spool_bytes", "Bytes that wait in the spool.")
        self.spool_damaged_bytes = gauge(
            "spool_damaged_bytes", "Bytes of the spool that its disk changed, put aside since the start."
        )
        self.spool_oldest_s = gauge("spool_oldest_seconds", "Age of the spool's oldest record; 0 when it is empty.")
        self.tokens = counter("tokens", "Tokens by kind.", "kind")
        self.sessions_named = counter("sessions_named", "Requests by what named their session.", "by")
        self.asked_again = counter(
            "asked_again",
            "Requests asked again before their first token: here (a stale cache, an adapter gone), or elsewhere.",
            "where",
        )
        self.index_misses = counter(
            "session_index_misses", "Requests with an answer in their history that no known session gave."
        )
        self.engine_in_flight = gauge("engine_requests_in_flight", "Requests put to an engine.", "engine")
        self.engine_offered = gauge("engine_offered", "Whether requests are put to an engine: 1 or 0.", "engine")
        self.policy_version = gauge("policy_version", "Newest version that an engine is known to serve.", "engine")
