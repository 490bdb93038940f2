"""A prompt with pictures has the token ids that the model's own processor gives it."""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from clawstream.conversation.pictures import (
    Picture,
    Sight,
    in_words,
    pictures_in,
    sealed,
    shows_picture,
    unsealed,
    without_marks,
)
from clawstream.errors import ConfigError
from tests.parts.pictures.seeing import MARKS, SEEN_BY_28, TEMPLATE, make_seeing
from tests.renderers import load_renderer

SIDES = st.integers(1, 6000)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffc"), max_size=30)
SIZES = st.tuples(st.integers(20, 300), st.integers(20, 300))


class Processor(Qwen2_5_VLProcessor):  # type: ignore[misc]  # transformers' classes are not typed
    """The family's own processor, without its part for videos, which needs a library of its own."""

    def check_argument_for_proper_class(self, *_: object) -> None:
        """Take what is there."""


@cache
def folder(model_type: str = "qwen2_5_vl") -> Path:
    return make_seeing(Path(mkdtemp()) / "model", model_type)


@cache
def processor(model_type: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder(model_type))
    images = Qwen2VLImageProcessorPil(**SEEN_BY_28)
    return Processor(image_processor=images, tokenizer=tokenizer, video_processor=None, chat_template=TEMPLATE)


def shown(width: int, height: int) -> Picture:
    return Picture(sha256=hashlib.sha256(f"{width}x{height}".encode()).hexdigest(), width=width, height=height)


def theirs(model_type: str, parts: Sequence[str | tuple[int, int]]) -> list[int]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    said = [{"role": "system", "content": "Look closely."}, {"role": "user", "content": content}]
    text = processor(model_type).apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    images = [Image.new("RGB", size) for size in parts if not isinstance(size, str)]
    return list(processor(model_type)(text=[text], images=images or None)["input_ids"][0])


def ours(model_type: str, parts: Sequence[str | tuple[int, int]], family: str) -> list[int]:
    content = [{"type": "text", "text": p if isinstance(p, str) else shown(*p).mark} for p in parts]
    said: list[dict[str, Any]] = [{"role": "system", "content": "Look closely."}, {"role": "user", "content": content}]
    return list(load_renderer(folder(model_type), family).prompt_ids(said, {}))


@given(width=SIDES, height=SIDES, cell=st.sampled_from([28, 32]), most=st.sampled_from([100_352, 12_845_056]))
@settings(max_examples=500)
def test_a_picture_takes_as_many_tokens_as_the_processor_gives_it(
    width: int, height: int, cell: int, most: int
) -> None:
    sight = Sight(begin="", pad="", end="", cell=cell, least_pixels=3136, most_pixels=most)
    picture = shown(width, height)
    try:
        tall, wide = smart_resize(height, width, cell, 3136, most)
    except ValueError:
        assert not sight.takes(picture)
        return
    assert sight.takes(picture)
    assert sight.num_tokens(picture) == tall * wide // cell**2


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("qwen2_vl", "auto"), ("qwen2_5_vl", "auto"), ("qwen3_vl", "auto"), ("qwen3_vl", "qwen3-vl")],
)
@given(parts=st.lists(TEXTS | SIZES, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_texts_and_pictures_in_any_order_get_the_processors_ids(model_type: str, family: str, parts: list[Any]) -> None:
    parts = ["Well: ", *parts]  # an empty message is another matter
    assert ours(model_type, parts, family) == theirs(model_type, parts)


def test_marks_of_the_vocabulary_in_a_text_are_letters_beside_a_picture_too() -> None:
    renderer = load_renderer(folder())
    pads = renderer.prompt_ids([{"role": "user", "content": f"<|image_pad|>{shown(56, 56).mark}<|image_pad|>"}], {})
    [pad] = [number for number in renderer.marker_ids if renderer.decode([number]) == "<|image_pad|>"]
    assert list(pads).count(pad) == 4


def test_only_the_texts_of_people_and_of_tools_show_pictures() -> None:
    renderer, mark = load_renderer(folder(), "qwen3"), shown(56, 56).mark
    escaped = json.dumps({mark: mark})
    calls = [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
        for arguments in (escaped, json.dumps({mark: mark}, ensure_ascii=False))
    ]
    tool = {"type": "function", "function": {"name": "look", "description": mark, "parameters": {"type": "object"}}}
    said: list[dict[str, Any]] = [
        {"role": "system", "content": mark},
        {"role": "user", "content": "Look.", "name": mark},
        {"role": "assistant", "content": mark, "reasoning_content": mark, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
        {"role": "user", "content": "And?"},
    ]
    assert renderer.prompt_ids(said, {"tools": [tool]}).count(renderer.picture_id) == 0
    said[3]["content"] = said[4]["content"] = mark
    assert renderer.prompt_ids(said, {"tools": [tool]}).count(renderer.picture_id) == 8


@given(st.lists(TEXTS | SIZES, max_size=6))
def test_a_text_is_the_pieces_and_the_pictures_that_it_is_cut_into(parts: list[Any]) -> None:
    text = "".join(part if isinstance(part, str) else shown(*part).mark for part in parts)
    found = list(pictures_in(text))
    assert "".join(piece + (picture.mark if picture else "") for piece, picture in found) == text
    assert [picture for _, picture in found if picture] == [shown(*part) for part in parts if not isinstance(part, str)]
    assert in_words(text) == "".join(part if isinstance(part, str) else "[picture]" for part in parts)
    assert [picture for _, picture in pictures_in(without_marks(text))] == [None]
    pictured = any(not isinstance(part, str) for part in parts)
    assert unsealed(sealed(text, "5ea1"), "5ea1") == text
    assert unsealed(text, "5ea1") == without_marks(text)
    assert [picture for _, picture in pictures_in(unsealed(sealed(text, "other"), "5ea1"))] == [None]
    for raw in (json.dumps(text).encode(), json.dumps(text, ensure_ascii=False).encode()):
        assert shows_picture(raw) is pictured


def test_a_model_that_sees_without_its_processors_file_is_refused_and_others_see_nothing(tmp_path: Path) -> None:
    blind = make_seeing(tmp_path / "model")
    (blind / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json can't be read"):
        load_renderer(blind)
    (blind / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert load_renderer(blind).sight is None
    assert load_renderer(folder()).sight is not None
    assert set(MARKS) <= set(AutoTokenizer.from_pretrained(folder()).get_added_vocab())
