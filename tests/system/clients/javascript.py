"""Packages of npm for tests: fetched once into the user's cache, run with the machine's node."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import filelock
import platformdirs

INSTALLED_WITHIN_S = 240
ANSWERS_WITHIN_S = 30.0


def installed(package: str, version: str, *others: str) -> Path:
    """A folder of modules that holds the package, and `others`, which are NAME@VERSION."""
    folder = Path(platformdirs.user_cache_dir("clawstream")) / "npm" / f"{package}-{version}"
    modules = folder / "node_modules"
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / "lock"):
        if not (folder / "done").exists():
            shutil.rmtree(modules, ignore_errors=True)
            npm = ("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder))
            command = [*npm, f"{package}@{version}", *others]
            subprocess.run(command, check=True, timeout=INSTALLED_WITHIN_S, capture_output=True)
            (folder / "done").touch()
    return modules


def openai() -> Path:
    """The package of OpenAI, fetched once."""
    return installed("openai", "7.55.0")


def ai_sdk() -> Path:
    """The AI SDK and its providers, fetched once."""
    return installed("ai", "6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7")


async def run(script: Path, *arguments: str, modules: Path) -> dict[str, Any]:
    """The JSON object that the script prints."""
    environment = {"PATH": os.environ["PATH"], "NODE_PATH": str(modules)}
    process = await asyncio.create_subprocess_exec(
        "node", str(script), *arguments, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            out, words = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, words.decode()
    found: dict[str, Any] = json.loads(out)
    return found
