"""The published description and the gateway agree: asked by schemathesis, with everything that it checks."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.gateway.house import house, until

KEY = "cs-of-the-test"
CONTEXT_TOKENS = 10_000_000
EXAMPLES = 60
SECONDS = 200


@pytest.mark.timeout(SECONDS + 30)
async def test_schemathesis_finds_no_difference(tokenizer_folder: Path, tmp_path: Path) -> None:
    async with house(tokenizer_folder, api_key=KEY) as gateway:
        gateway.engine.context_length_tokens = CONTEXT_TOKENS

        async def roomy() -> bool:
            return (
                f'"max_model_len":{CONTEXT_TOKENS}'
                in (await gateway.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}))[1]
            )

        await until(roomy)
        arguments = [
            *("run", f"{gateway.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
            *("--checks", "all", "--max-examples", str(EXAMPLES), "--seed", "1", "--workers", "1"),
            *("--generation-database", "none", "--no-color", "--max-time", "60"),
        ]
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("schemathesis")), *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        async with asyncio.timeout(SECONDS):
            said, _ = await process.communicate()
    print(said.decode()[-1500:])
    assert process.returncode == 0, said.decode()
