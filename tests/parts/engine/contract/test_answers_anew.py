"""Several answers to one prompt: it is read once, and each says something else."""

from collections.abc import AsyncGenerator

import pytest

from clawstream.events import AnswerRefreshed, Sampling
from clawstream.inference.engine import Chunk, GenerateRequest
from clawstream.inference.sglang import SglangEngine
from clawstream.refresh.answering import Refresher
from clawstream.refresh.asking import RefreshRequest
from tests.parts.engine.conftest import ON_SGLANG, Subject
from tests.parts.refresh.test_answering import Numbers

pytestmark = pytest.mark.slow

PROMPT = tuple(range(40, 104)) * 2
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=8, seed=3, stop=())


class Overheard(SglangEngine):
    """Keeps what was cached of each prompt."""

    cached: list[int | None]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        chunks = [chunk async for chunk in super().generate(request)]
        self.cached.append(chunks[0].cached_tokens)
        for chunk in chunks:
            yield chunk


@pytest.mark.parametrize("subject", ["cpu", pytest.param("sglang", marks=ON_SGLANG)], indirect=True)
async def test_answers_to_one_prompt_share_what_is_cached_of_it_and_differ(subject: Subject) -> None:
    engine = Overheard(subject.session, subject.url)
    engine.cached = []
    refresher = Refresher([engine], Numbers())
    said = []
    for number in range(1, 5):
        ask = RefreshRequest(
            session_id="s", turn_id="t", number=number, policy_id="policy", prompt_ids=PROMPT, sampling=SAMPLING,
            at_ms=0,
        )  # fmt: skip
        [event] = await refresher.answer(ask)
        assert isinstance(event, AnswerRefreshed)
        said.append(event.output_ids)
    first, *others = engine.cached
    assert first == 0
    assert all(cached is not None and cached >= len(PROMPT) // 2 for cached in others)
    assert len(set(said)) == 4
