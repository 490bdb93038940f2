"""`clawstream up` as somebody tries it first: no model is named, and a question is asked by HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from clawstream.local.servers import accounts


@pytest.mark.slow
@pytest.mark.timeout(900)  # SmolLM2 is fetched into the user's cache folder, once
def test_up_without_a_model_answers_in_english(tmp_path: Path) -> None:
    config = tmp_path / "clawstream.toml"
    ports = "".join(f"[{section}]\nport = 0\n" for section in ("engine", "gateway", "monitor"))
    config.write_text(
        f'environment = false\ndata_dir = "{tmp_path}/data"\ncache_dir = "{accounts.cache_folder()}"\n{ports}'
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CLAWSTREAM_")}
    command = [sys.executable, "-m", "clawstream", "-c", str(config), "up"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=inherited)
    assert process.stderr is not None
    said = ""
    try:
        while "Ctrl-C stops everything" not in said and (line := process.stderr.readline()):
            said += line
        found = re.search(r"clawstream is up: (http://[0-9.:]+/v1)", said)
        assert found is not None, said
        question = {"role": "user", "content": "What is the capital of France?"}
        body = json.dumps({"messages": [question], "temperature": 0, "max_tokens": 12}).encode()
        with urllib.request.urlopen(f"{found[1]}/chat/completions", body, timeout=300) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=120)[1]
    assert "the capital of France is Paris" in answer.replace("The", "the")
    corrects = f"clawstream -c {config} feedback ANSWER --hint WORDS"
    assert f'words are trained on at once (training.cadence = "correction"): {corrects}' in said
    assert process.returncode == 0, said
