"""The bounds on how long the gateway waits for others, and how much it takes from them."""

from dataclasses import dataclass

from clawstream.gateway.engines import ANSWERS_WITHIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one gateway; only tests change them."""

    request_timeout_s: float = 30.0  # for a request's headers, then for its body, then to render it
    idle_timeout_s: float = 60.0  # from an answer to the next request on its connection
    write_timeout_s: float = 30.0  # for 64 KiB to be read; a client that reads nothing for so long is given up
    heartbeat_s: float = 10.0  # between comments on a silent stream; proxies cut what is silent for 30 to 60 s
    first_token_timeout_s: float = 300.0  # an engine may hold a request in its queue, and prefill 100,000 tokens
    engine_answers_within_s: float = ANSWERS_WITHIN_S
    ack_timeout_s: float = 0.02  # an answer's end waits so long for Kafka; then the exchange goes to the spool
    max_body_bytes: int = 8 * 2**20  # some 2,000,000 tokens of text
    index_window_s: int = 86_400  # sessions and answers of the last day are read from the log at the start
