"""A reward model on SGLang's two routes that rates answers as the simulations' student likes them, with noise.

It sees the conversation up to the answer, and nothing of what happened next. `python -m tests.fakes.reward_model PORT`.
"""

import json
import random
import re
import sys

from aiohttp import web

from clawstream.simulation.reactions import Impression, PersonTask, impression

ABOVE = 0.0  # an answer that is rated higher is as the student likes it, as far as the noise lets it be told
LIKED = {Impression.GOOD: 2.0, Impression.STEPS_MISSING: -1.0, Impression.WRONG: -1.0, Impression.OFF_STYLE: -2.0}
NOISE = 1.0  # standard deviation
_SUM = re.compile(r"(\d+) \+ (\d+)")


def rating(messages: list[dict[str, str]]) -> float:
    """Return the number of the last message, an answer in a conversation about a sum; the same for the same words."""
    said = " ".join(message["content"] for message in messages if message["role"] == "user")
    found = _SUM.search(said)
    if found is None:
        return 0.0
    left, right = map(int, found.groups())
    task = PersonTask(persona="student", question=f"{left} + {right}", answer=str(left + right))
    answer = messages[-1]["content"]
    return LIKED[impression(task, answer)] + random.Random(said + answer).gauss(0.0, NOISE)


async def tokenize(request: web.Request) -> web.Response:
    """Give the conversation's bytes as its token ids, so that the other route has all that it needs."""
    body = await request.json()
    return web.json_response({"tokens": list(json.dumps(body["messages"]).encode())})


async def classify(request: web.Request) -> web.Response:
    """Give the number of the conversation that the ids are the bytes of."""
    ids = (await request.json())["input_ids"]
    return web.json_response({"embedding": [rating(json.loads(bytes(ids)))]})


def app() -> web.Application:
    """Return the two routes."""
    served = web.Application(client_max_size=2**24)
    served.add_routes([web.post("/tokenize", tokenize), web.post("/classify", classify)])
    return served


if __name__ == "__main__":
    web.run_app(app(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
