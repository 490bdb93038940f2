"""Promise 7 over an abstract engine: whatever happens in whatever order, no answer that is shown rests on a cache that
other weights filled.

The engine is one cache by key, filled by prefills and by requests that end, and one version in force; it may be
swapped in place or afresh, as the weights stage decides, and it may be killed and come back with the base. Two
gateways ask it. What they hear, they hear late: first tokens, activations, what the engine said when it was asked.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from clawstream.events import PolicyActivated
from clawstream.gateway.engines import EngineAttempt, Engines, ServedEngine, StaleCache
from clawstream.inference.engine import Chunk
from tests.examples import examples
from tests.unit.gateway.test_engines import activated, served


@dataclass(eq=False)
class Asked:
    """A request; `read` and `prefilled_by` are of the prefill that its first token came from."""

    gateway: int
    place: EngineAttempt
    prefilled_by: int | None = None
    read: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()
    chunk: Chunk | None = None


@dataclass
class World:
    """One engine, two gateways, and the weights stage."""

    gateways: tuple[ServedEngine, ...] = field(default_factory=lambda: (served(), served()))
    weights: int = 0
    newest: int = 0
    on_log: int = 0
    cache: dict[str, frozenset[int]] = field(default_factory=lambda: defaultdict(frozenset))
    waiting: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)  # prefilled, nothing of them sent yet
    spoken: list[Asked] = field(default_factory=list)  # their first token is on its way to the gateway
    streaming: list[Asked] = field(default_factory=list)
    events: list[tuple[int, PolicyActivated]] = field(default_factory=list)
    answers: list[tuple[int, int, int | None]] = field(default_factory=list)  # gateway, what was said, known before
    shown: int = 0

    def send(self, n: int) -> None:
        gateway = n % 2
        self.waiting.append(Asked(gateway=gateway, place=self.gateways[gateway].place()))

    def answer(self, n: int) -> None:
        """One request from its sending to its end, with nothing in between."""
        self.send(n)
        for act in (self.prefill, self.speak, self.hear, self.finish):
            act(-1)

    def prefill(self, n: int) -> None:
        if self.waiting:
            asked = self.waiting.pop(n if n < 0 else n % len(self.waiting))
            self._compute(asked)
            self.running.append(asked)

    def _compute(self, asked: Asked) -> None:
        key = asked.place.extra_key
        asked.read, asked.prefilled_by = self.cache[key], self.weights
        asked.filled = asked.read | {self.weights}
        self.cache[key] = asked.filled

    def speak(self, n: int) -> None:
        """A label may be newer than the token: weights change between sampling and sending."""
        if self.running:
            asked = self.running.pop(n if n < 0 else n % len(self.running))
            asked.chunk = Chunk(
                token_ids=(1,), logprobs_nats=(-1.0,), cached_tokens=len(asked.read), weight_version=str(self.weights)
            )
            self.spoken.append(asked)
            self.streaming.append(asked)

    def hear(self, n: int) -> None:
        if self.spoken:
            asked = self.spoken.pop(n if n < 0 else n % len(self.spoken))
            assert asked.chunk is not None
            try:
                asked.place.check(asked.chunk)
            except StaleCache:
                self.waiting.append(Asked(gateway=asked.gateway, place=self.gateways[asked.gateway].place()))
                return
            self.shown += 1
            assert asked.read <= {asked.prefilled_by}, (asked, self)

    def finish(self, n: int) -> None:
        if self.streaming:
            asked = self.streaming.pop(n if n < 0 else n % len(self.streaming))
            self.cache[asked.place.extra_key] |= asked.filled | {self.weights}

    def publish(self, _n: int) -> None:
        self.newest += 1

    def swap(self, _n: int) -> None:
        if self.weights == self.newest:
            return
        afresh, self.weights = self.weights != self.on_log, self.newest
        if afresh:
            self.cache.clear()
            for asked in (*self.running, *self.streaming):
                self._compute(asked)
        self.on_log = self.newest
        self.events += [(gateway, activated(self.newest)) for gateway in range(2)]

    def restart(self, _n: int) -> None:
        self.weights = 0
        self.cache.clear()
        for requests in (self.waiting, self.running, self.streaming):
            requests.clear()

    def learn(self, _n: int) -> None:
        if self.events:
            gateway, event = self.events.pop(0)
            Engines("policy", [self.gateways[gateway]]).learn(event)

    def ask(self, n: int) -> None:
        self.answers.append((n % 2, self.weights, self.gateways[n % 2].weights))

    def told(self, n: int) -> None:
        if self.answers:
            gateway, weights, before = self.answers.pop(n if n < 0 else n % len(self.answers))
            self.gateways[gateway].reported(weights, before)


ACTIONS = ("answer", "send", "prefill", "speak", "hear", "finish", "publish", "swap", "restart", "learn", "ask", "told")
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=60)


def _run(names: str) -> list[tuple[str, int]]:
    return [(name, 0) for name in names.split()]


@examples(15)
@given(STEPS)
@example(_run("send prefill send publish swap prefill speak speak hear hear"))
@example(_run("answer publish swap learn answer"))
@example(  # killed unseen, asked under the key of the version that it had, and brought up to date
    _run("publish swap learn restart send send prefill swap prefill speak hear speak hear")
)
def test_no_answer_that_is_shown_rests_on_a_cache_that_other_weights_filled(steps: list[tuple[str, int]]) -> None:
    world = World()
    for name, number in steps:
        act: Callable[[int], None] = getattr(world, name)
        act(number)


def test_the_model_shows_answers_and_finds_stale_ones() -> None:
    world = World()
    for name in ("send", "prefill", "speak", "hear", "send", "publish", "swap", "prefill", "speak", "hear"):
        getattr(world, name)(0)
    assert (world.shown, len(world.waiting), world.gateways[0].weights) == (1, 1, 1)
