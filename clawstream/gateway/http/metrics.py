"""The metrics of /metrics. No label ever holds a client's text."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Metrics:
    """One gateway's counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "clawstream_requests", "Chat requests by how they ended.", ["outcome"], registry=self.registry
        )
        self.limited = Counter(
            "clawstream_requests_limited",
            "Requests refused by a limit: the gateway's, or a key's rate or concurrency.",
            ["limit"],
            registry=self.registry,
        )
        self.in_flight = Gauge("clawstream_requests_in_flight", "Requests being answered.", registry=self.registry)
        self.ttft_s = Histogram(
            "clawstream_ttft_seconds",
            "From the request's last byte to the answer's first token.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.rendering_s = Histogram(
            "clawstream_rendering_seconds",
            "Messages to prompt tokens, by how the prompt was made.",
            ["made"],
            buckets=_SHORT_S,
            registry=self.registry,
        )
        self.prompts = Counter(
            "clawstream_prompts",
            "Prompts by how they were made: all answers of the history as sampled, some, none, or none although known.",
            ["made"],
            registry=self.registry,
        )
        self.ack_wait_s = Histogram(
            "clawstream_ack_wait_seconds",
            "How long the end of an answer waited for Kafka or the spool.",
            buckets=_SHORT_S,
            registry=self.registry,
        )
        self.spooled = Counter(
            "clawstream_spooled_records", "Records put into the spool, and not straight to Kafka.",
            registry=self.registry,
        )  # fmt: skip
        self.spool_s = Histogram(
            "clawstream_spool_append_seconds",
            "From a record's arrival at the spool to the end of its fsync.",
            buckets=_SHORT_S,
            registry=self.registry,
        )
        self.spool_records = Gauge("clawstream_spool_records", "Records in the spool.", registry=self.registry)
        self.spool_bytes = Gauge("clawstream_spool_bytes", "What waits in the spool.", registry=self.registry)
        self.spool_damaged_bytes = Gauge(
            "clawstream_spool_damaged_bytes", "Bytes of the spool that its disk changed, put aside since the start.",
            registry=self.registry,
        )  # fmt: skip
        self.spool_oldest_s = Gauge(
            "clawstream_spool_oldest_seconds", "Age of the spool's oldest record; 0 when it is empty.",
            registry=self.registry,
        )  # fmt: skip
        self.tokens = Counter("clawstream_tokens", "Tokens by kind.", ["kind"], registry=self.registry)
        self.sessions_named = Counter(
            "clawstream_sessions_named", "Requests by what named their session.", ["by"], registry=self.registry
        )
        self.asked_again = Counter(
            "clawstream_asked_again",
            "Requests asked again before their first token: here (a stale cache, an adapter gone), or elsewhere.",
            ["where"],
            registry=self.registry,
        )
        self.index_misses = Counter(
            "clawstream_session_index_misses",
            "Requests with an answer in their history that no known session gave.",
            registry=self.registry,
        )
        self.engine_in_flight = Gauge(
            "clawstream_engine_requests_in_flight", "Requests put to an engine.", ["engine"], registry=self.registry
        )
        self.engine_offered = Gauge(
            "clawstream_engine_offered", "Whether requests are put to an engine: 1 or 0.", ["engine"],
            registry=self.registry,
        )  # fmt: skip
        self.policy_version = Gauge(
            "clawstream_policy_version", "Newest version known to serve.", ["engine"], registry=self.registry
        )
