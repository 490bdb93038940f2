"""Pictures of a request: which parts are pictures, what stands in their place, and what is refused."""

import base64
import hashlib
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clawstream.conversation.messages import parse, text_of
from clawstream.conversation.pictures import END, Picture, Sight, pictures_in
from clawstream.gateway.picture_store import PictureStore
from clawstream.gateway.requests import pictures as module
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.pictures import ShownPicture, with_known_marks, with_marks
from clawstream.gateway.requests.wire import read_request
from tests.pictures import data_url, picture

SIGHT = Sight(begin="<s>", pad="<p>", end="</s>", cell=28, least_pixels=3136, most_pixels=100_352)
RED, BLUE = picture(60, 40), picture(30, 90, red=0)


def mark(data: bytes) -> str:
    width, height = Image.open(io.BytesIO(data)).size
    return Picture(sha256=hashlib.sha256(data).hexdigest(), width=width, height=height).mark


def openai(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "high"}}


def anthropic(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def responses(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data)}


def asked(*parts: Any, key: str = "messages") -> dict[str, Any]:
    return {key: [{"role": "user", "content": list(parts)}], "model": "policy"}


@pytest.mark.parametrize(
    ("part", "kind", "key"),
    [(openai, "text", "messages"), (anthropic, "text", "messages"), (responses, "input_text", "input")],
)
def test_each_form_becomes_a_text_of_its_own_dialect_in_its_place(part: Any, kind: str, key: str) -> None:
    said = {"type": kind, "text": "what is it?"}
    body, shown = with_marks(asked(part(RED), said, part(BLUE), part(RED), key=key), SIGHT)
    texts = [found["text"] for found in body[key][0]["content"]]
    assert texts == [mark(RED), "what is it?", mark(BLUE), mark(RED)]
    assert {found["type"] for found in body[key][0]["content"]} == {kind}
    assert sorted(one.data for one in shown) == sorted([RED, BLUE])
    assert body["model"] == "policy"


def test_a_picture_in_a_tools_result_is_found() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, anthropic(BLUE)]}
    body, [one] = with_marks(asked(result), SIGHT)
    assert body["messages"][0]["content"][0]["content"][1] == {"type": "text", "text": mark(BLUE)}
    assert (one.data, one.picture.width, one.picture.height) == (BLUE, 30, 90)


MARKED = st.lists(st.sampled_from([mark(RED), mark(BLUE), END, "a", " b\n", "\\uFffC"]), max_size=5).map("".join)
JSON = st.recursive(
    MARKED, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MARKED, inner, max_size=3), max_leaves=8
)


@given(text=MARKED, anything=JSON, known=st.sets(st.sampled_from([RED, BLUE])))
def test_a_mark_counts_in_a_messages_text_alone_and_for_known_pictures_alone(
    text: str, anything: Any, known: set[bytes]
) -> None:
    hashes = {hashlib.sha256(data).hexdigest() for data in known}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(anything)}}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {"properties": anything}}}
    body = {
        "messages": [
            {"role": "user", "content": text, "name": text},
            {"role": "user", "content": [{"type": "text", "text": text, "said": anything}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": text},
            {"role": "tool", "tool_call_id": "c", "content": text},
        ],
        "tools": [tool],
        "user": text,
    }
    chat = with_known_marks(read_request(body), hashes)
    for at in (0, 1, 3):
        told = text_of(chat.messages[at])
        assert {found.sha256 for _, found in pictures_in(told) if found} <= hashes
        assert all(told.count(mark(data)) == text.count(mark(data)) for data in known)
    shown_at = [text_of(chat.messages[at]).count(END) for at in (0, 1, 3)]
    raw = b"".join(chat.messages_json) + chat.options_json
    arguments = chat.messages[2]["tool_calls"][0]["function"]["arguments"]
    assert END not in json.dumps(json.loads(arguments), ensure_ascii=False), "arguments are JSON in a text"
    assert raw.count(END.encode()) == sum(shown_at)
    assert tuple(map(parse, chat.messages_json)) == chat.messages
    assert json.loads(chat.options_json) == chat.options


def test_what_only_looks_like_a_picture_in_a_calls_arguments_stays_as_it_is() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"type": "image", "source": "https://x/y.png"}}
    body = {"messages": [{"role": "assistant", "content": [use]}, {"role": "system", "content": [openai(RED)]}]}
    assert with_marks(body, SIGHT) == (body, ())


def test_a_picture_that_comes_twice_is_read_once_and_many_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    read = module._read
    monkeypatch.setattr(module, "_read", lambda *given: calls.append("read") or read(*given))  # type: ignore[func-returns-value]
    with_marks(asked(openai(RED), openai(RED), openai(BLUE)), SIGHT)
    assert len(calls) == 2
    monkeypatch.setattr(module, "MOST_PIXELS", 60 * 40 + 30 * 90 - 1)
    with_marks(asked(openai(RED), openai(RED)), SIGHT)
    with pytest.raises(BadRequest, match="there are pictures of 5100 pixels"):
        with_marks(asked(openai(RED), openai(BLUE)), SIGHT)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_breaks_off_is_not_kept(form: str, tmp_path: Path) -> None:
    noise = Image.effect_noise((90, 70), 90).convert("RGB")
    written = io.BytesIO()
    noise.save(written, format=form)
    whole, store = written.getvalue(), PictureStore(tmp_path)
    for data, fits in ((whole, True), (whole[: len(whole) // 2], False)):
        shown = ShownPicture(picture=Picture(sha256=hashlib.sha256(data).hexdigest(), width=90, height=70), data=data)
        if fits:
            store.put([shown, shown])
        else:
            with pytest.raises(BadRequest, match="can't be decoded"):
                store.put([shown])
    assert [name for name, _, _ in store.kept()] == [hashlib.sha256(whole).hexdigest()]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [hashlib.sha256(whole).hexdigest()]
    assert str(store.data_url(Picture(sha256=hashlib.sha256(whole).hexdigest(), width=1, height=1))).startswith(
        f"data:image/{form.lower()};"
    )


@pytest.mark.parametrize("turned", [3, 6, 8])
def test_a_photograph_that_lies_on_its_side_is_turned_and_kept_as_it_then_is(turned: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turned
    lying = picture(80, 30, form="JPEG", exif=exif)
    _, [one] = with_marks(asked(openai(lying)), SIGHT)
    upright = Image.open(io.BytesIO(one.data))
    assert upright.size == (one.picture.width, one.picture.height) == ((80, 30) if turned == 3 else (30, 80))
    assert upright.getexif().get(0x0112, 1) == 1
    assert hashlib.sha256(one.data).hexdigest() == one.picture.sha256
    _, [again] = with_marks(asked(openai(one.data)), SIGHT)
    assert again.picture == one.picture


def said_to_be(side: int) -> bytes:
    """A small file whose header tells of a square of so many pixels."""
    kind = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return RED[:12] + kind + struct.pack(">I", zlib.crc32(kind)) + RED[33:]


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (url("https://example.org/a.png"), "this gateway fetches none"),
        (url("file:///etc/passwd"), "this gateway fetches none"),
        (url("data:image/png;base64,%%%"), "no picture in base64"),
        (url(data_url(b"not a picture")), "no picture in PNG, JPEG, WEBP, GIF"),
        (url(data_url(picture(4, 900))), "too narrow"),
        (url(data_url(said_to_be(8000))), "expected at most 50000000"),
        (url(data_url(said_to_be(60_000))), "decompression bomb"),
        ({"type": "input_image", "file_id": "file-1"}, "by the id of a file"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "by the id of a file"),
        ({"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/"}}, "this gateway fetches none"),
    ],
)
def test_what_can_not_be_shown_is_refused_with_its_place(part: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        with_marks(asked({"type": "text", "text": "see"}, part), SIGHT)
    assert "messages[0].content[1]" in str(refused.value)


def test_too_many_pictures_are_refused() -> None:
    with pytest.raises(BadRequest, match="over 64 pictures"):
        with_marks(asked(*[openai(BLUE) for _ in range(65)]), SIGHT)


@pytest.mark.parametrize(
    "part", [{"type": "image_url"}, {"type": "image", "source": 3}, {"type": "image_url", "image_url": {}}]
)
def test_a_malformed_part_is_left_to_the_dialect_that_refuses_it(part: dict[str, Any]) -> None:
    body, shown = with_marks(asked(part), SIGHT)
    assert body["messages"][0]["content"] == [part]
    assert shown == ()
