"""Packages of PyPI for tests, in environments of their own: a script asks by one of them, and prints what it saw."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

PACKAGES: dict[str, tuple[str, ...]] = {
    "openai": ("openai==2.8.0",),
    "anthropic": ("anthropic==2.10.0",),
    "litellm": ("litellm==1.83.0",),
    "langchain": ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.38.0",),
    "instructor": ("instructor==1.17.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "agents": ("openai-agents==0.24.0",),
}


INSTALLED_WITHIN_S = 240


def install() -> None:
    """Have the packages of all clients in uv's cache, of which it makes an environment in moments."""
    for client in PACKAGES:
        subprocess.run([*_python(client), "-c", ""], check=True, timeout=INSTALLED_WITHIN_S, capture_output=True)


def _python(client: str) -> list[str]:
    packages = [word for package in PACKAGES[client] for word in ("--with", package)]
    return ["uv", "run", "--quiet", "--no-project", "--isolated", "--python", "3.11", *packages, "python"]


async def seen_by(client: str, script: Path, url: str) -> dict[str, Any]:
    """The JSON that the script prints, in an environment that holds the client's packages."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    process = await asyncio.create_subprocess_exec(
        *_python(client), str(script), url, client,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, words = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, words.decode()[-3000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found
