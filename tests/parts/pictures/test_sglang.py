"""A real SGLang with a small Qwen2.5-VL of random weights: it reads the recorded ids, and sees the picture."""

import asyncio
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from clawstream.gateway.requests.pictures import with_marks, with_true_marks
from clawstream.gateway.requests.wire import read_request
from clawstream.inference.engine import Chunk, GenerateRequest, SamplingParams
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.pictures.seeing import MARKS, make_seeing
from tests.parts.sglang.process import sglang_engine
from tests.pictures import data_url
from tests.renderers import load_renderer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
# Kernels that SGLang's package for a CPU lacks. Models that nobody asks for name them, or none that sees is there.
LACKING = """import torch
for name in (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "causal_conv1d_weight_pack", "fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_qkvzba_split_reshape_cat_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    torch.library.define(f"sgl_kernel::{name}", "(Tensor a) -> Tensor")
"""


def make_model(folder: Path) -> Path:
    """Write the model and return its folder."""
    make_seeing(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True, "eos_token_id": ids["<|im_end|>"], "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | PROCESSOR))
    return folder


def noise(width: int, height: int, seed: int) -> bytes:
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(written, format="PNG")
    return written.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    (model.parent / "sitecustomize.py").write_text(LACKING)
    paths = os.pathsep.join(filter(None, (str(model.parent), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch, reserved() as port:
        patch.setenv("PYTHONPATH", paths)
        with sglang_engine(model, port) as found:
            yield found


def asked(renderer: PromptRenderer, pictures: list[bytes]) -> list[int]:
    """Return a prompt's ids: the pictures, and words that no tokenizer would cut as they are cut here."""
    assert renderer.sight is not None
    shown = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in pictures]
    sealed_body, _ = with_marks(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "See: "}, *shown]}]}, renderer.sight, "seal"
    )
    body = {"messages": with_true_marks(read_request(sealed_body), "seal").messages}
    letters = [token for letter in " tomorrow" for token in renderer.encode(letter)]
    return [*renderer.prompt_ids(body["messages"], {}), *letters]


async def answered(url: str, request: GenerateRequest) -> list[Chunk]:
    async with aiohttp.ClientSession() as http, asyncio.timeout(120):
        return [chunk async for chunk in SglangEngine(http, url).generate(request)]


@torch.no_grad()
def logp_by_transformers(folder: Path, ids: list[int], tokens: list[int], pictures: list[bytes]) -> list[float]:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    images = [Image.open(io.BytesIO(data)) for data in pictures]
    seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=images, return_tensors="pt")
    ids_1L = torch.tensor([ids + tokens])
    kinds_1L = (ids_1L == model.config.image_token_id).long()
    logits_1LV = model(input_ids=ids_1L, mm_token_type_ids=kinds_1L, **seen).logits
    logp_LV = logits_1LV[0].log_softmax(1)
    return [float(logp_LV[len(ids) - 1 + at, token]) for at, token in enumerate(tokens)]


# Whole cells: libraries scale pictures a little differently, by up to 0.1 nats of what is sampled here.
@pytest.mark.parametrize("sizes", [[(168, 112)], [(56, 56), (140, 196), (56, 56)]])
def test_what_it_samples_has_the_log_probs_of_the_recorded_ids_and_the_pictures(
    url: str, model: Path, sizes: list[tuple[int, int]]
) -> None:
    renderer = load_renderer(model)
    pictures = [noise(*size, seed=number) for number, size in enumerate(sizes)]
    ids = asked(renderer, pictures)
    request = GenerateRequest(
        input_ids=ids, sampling=SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True),
        pictures=tuple(map(data_url, pictures)), picture_id=renderer.picture_id,
    )  # fmt: skip
    assert len(request.unexpanded_ids) < len(ids)
    chunks = asyncio.run(answered(url, request))
    assert chunks[-1].prompt_tokens == len(ids)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    found = [value for chunk in chunks for value in chunk.logprobs_nats]
    expected = logp_by_transformers(model, ids, tokens, pictures)
    assert found == pytest.approx(expected, abs=2e-3)
    others = logp_by_transformers(model, ids, tokens, [noise(*size, seed=9) for size in sizes])
    assert found != pytest.approx(others, abs=2e-3), "the picture counts"
