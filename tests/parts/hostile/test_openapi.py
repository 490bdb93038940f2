"""The published description and the gateway agree: asked by schemathesis, with everything that it checks."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.parts.gateway.running_gateway import running_gateway, until
from tests.parts.hostile import unsaid

pytestmark = pytest.mark.slow

KEY = "cs-of-the-test"
CONTEXT_TOKENS = 10_000_000
EXAMPLES = 25
SECONDS = 300
MESSAGES, COUNT_TOKENS, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
# Side by side. What counts tokens has the parser of /v1/messages, so that its fields one by one would be asked twice.
RUNS = (
    ("--include-path", MESSAGES, "--phases", "coverage,fuzzing"),
    ("--include-path", RESPONSES, "--phases", "coverage,fuzzing"),
    (
        *("--exclude-path", MESSAGES, "--exclude-path", COUNT_TOKENS, "--exclude-path", RESPONSES),
        *("--phases", "coverage,fuzzing,stateful"),
    ),
    ("--include-path", COUNT_TOKENS, "--phases", "fuzzing"),
)


async def asked(url: str, folder: Path, run: tuple[str, ...]) -> tuple[int | None, str]:
    """The exit status of schemathesis, and what it said."""
    root = str(Path(unsaid.__file__).parents[3])
    arguments = [
        *("run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--checks", "all", *run),
        *("--max-examples", str(EXAMPLES), "--seed", "1", "--generation-database", "none", "--no-color"),
    ]
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("schemathesis")), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "SCHEMATHESIS_HOOKS": unsaid.__name__},
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.timeout(SECONDS + 30)
async def test_schemathesis_finds_no_difference(tokenizer_folder: Path, tmp_path: Path) -> None:
    async with running_gateway(tokenizer_folder, api_key=KEY) as gateway:
        gateway.engine.context_length_tokens = CONTEXT_TOKENS

        async def roomy() -> bool:
            return (
                f'"max_model_len":{CONTEXT_TOKENS}'
                in (await gateway.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}))[1]
            )

        await until(roomy)
        async with asyncio.timeout(SECONDS):
            found = await asyncio.gather(*(asked(gateway.url, tmp_path, run) for run in RUNS))
    print(*(said[-600:] for _, said in found))
    assert [status for status, _ in found] == [0] * len(RUNS), "\n".join(said for status, said in found if status != 0)
