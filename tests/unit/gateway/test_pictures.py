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
from clawstream.conversation.pictures import END, Picture, Sight, pictures_in, sealed
from clawstream.gateway.picture_store import PictureStore
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.pictures import ShownPicture, shows, with_marks, with_sealed_marks, with_true_marks
from clawstream.gateway.requests.wire import read_request
from tests.pictures import data_url, picture

SIGHT = Sight(begin="<s>", pad="<p>", end="</s>", cell=28, least_pixels=3136, most_pixels=100_352)
SEAL = "5ea1" * 8
RED, BLUE = picture(60, 40), picture(30, 90, red=0)


def mark(data: bytes) -> str:
    width, height = Image.open(io.BytesIO(data)).size
    return Picture(sha256=hashlib.sha256(data).hexdigest(), width=width, height=height).mark


def marked(body: dict[str, Any]) -> Any:
    """Return the body with marks as they are recorded, and the pictures."""
    found, shown = with_marks(body, SIGHT, SEAL)
    return json.loads(
        json.dumps(found).replace(json.dumps(f"{END}{SEAL} ")[1:-1], json.dumps(f"{END}picture ")[1:-1])
    ), shown


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
    body, shown = marked(asked(part(RED), said, part(BLUE), part(RED), key=key))
    texts = [found["text"] for found in body[key][0]["content"]]
    assert texts == [mark(RED), "what is it?", mark(BLUE), mark(RED)]
    assert {found["type"] for found in body[key][0]["content"]} == {kind}
    assert sorted(one.data for one in shown) == sorted([RED, BLUE])
    assert body["model"] == "policy"


def test_a_picture_in_a_tools_result_is_found() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, anthropic(BLUE)]}
    body, [one] = marked(asked(result))
    assert body["messages"][0]["content"][0]["content"][1] == {"type": "text", "text": mark(BLUE)}
    assert (one.data, one.picture.width, one.picture.height) == (BLUE, 30, 90)


TEXTS = st.lists(
    st.sampled_from([mark(RED), mark(BLUE), sealed(mark(RED), SEAL), sealed(mark(BLUE), "other"), END, SEAL, "a"]),
    max_size=6,
).map("".join)


@given(texts=st.lists(TEXTS, min_size=5, max_size=5))
def test_a_mark_counts_only_with_the_seal_and_in_the_texts_of_people_and_tools(texts: list[str]) -> None:
    body = {
        "messages": [
            {"role": "system", "content": texts[0]},
            {"role": "user", "content": texts[1]},
            {"role": "user", "content": [{"type": "text", "text": texts[2]}]},
            {"role": "assistant", "content": texts[3]},
            {"role": "tool", "tool_call_id": "c", "content": texts[4]},
        ],
    }
    chat = with_true_marks(read_request(body), SEAL)
    told = list(map(text_of, chat.messages))
    for at, (before, after) in enumerate(zip(texts, told, strict=True)):
        num = before.count(sealed(mark(RED), SEAL)) if at in (1, 2, 4) else 0
        assert [found.mark for _, found in pictures_in(after) if found] == [mark(RED)] * num
        assert after.count(END) == 2 * num
    assert tuple(map(parse, chat.messages_json)) == chat.messages


RECORDED = st.lists(st.sampled_from([mark(RED), mark(BLUE), "a", " b"]), max_size=4).map("".join)


@given(st.lists(RECORDED, max_size=3))
def test_what_a_request_goes_on_from_keeps_its_marks(texts: list[str]) -> None:
    before = [{"role": "user", "content": text} for text in texts]
    asks = {"role": "user", "content": f"and {mark(RED)}?"}
    chat = with_true_marks(read_request({"messages": [*with_sealed_marks(before, SEAL), asks]}), SEAL)
    assert [*chat.messages[:-1]] == before
    assert END not in text_of(chat.messages[-1])


def test_a_request_without_marks_in_texts_is_left_as_it_came() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"end": "\\ufffc"}'}}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": f"removes {END}", "parameters": {"type": "object"}},
    }
    chat = read_request({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool]})
    after = with_true_marks(chat, SEAL)
    assert (after.messages, after.options, after.options_json) == (chat.messages, chat.options, chat.options_json)


@pytest.mark.parametrize("role", [[], {}, 3, "assistant"])
def test_an_odd_role_is_left_to_the_dialect(role: Any) -> None:
    body = {"messages": [{"role": role, "content": [openai(RED)]}], "input": ["x", None, 3]}
    assert with_marks(body, SIGHT, SEAL) == (body, ())
    assert shows(body)
    assert not shows({"messages": [{"role": "user", "content": "image_url"}], "input": "x"})


@pytest.mark.parametrize("tag", [(0x011A, 7, b"\0\0\0\1\0\0\0\1"), (0x8298, 99, b"\xff" * 4)])
def test_what_else_a_photograph_says_of_itself_does_not_matter(tag: tuple[int, int, bytes]) -> None:
    number, kind, value = tag
    entries = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0) + struct.pack(">HHII", number, kind, len(value), 38)
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 2) + entries + b"\0\0\0\0" + value
    _, [one] = marked(asked(openai(picture(60, 40, form="JPEG", exif=exif))))
    assert (one.picture.width, one.picture.height) == (40, 60)


def test_what_only_looks_like_a_picture_in_a_calls_arguments_stays_as_it_is() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"type": "image", "source": "https://x/y.png"}}
    body = {"messages": [{"role": "assistant", "content": [use]}, {"role": "system", "content": [openai(RED)]}]}
    assert marked(body) == (body, ())


def test_a_picture_that_comes_twice_counts_once_and_too_many_pixels_together_are_refused() -> None:
    large, other = said_to_be(6000), said_to_be(4000)
    _, [one] = marked(asked(openai(large), openai(large)))
    assert one.data == large
    with pytest.raises(BadRequest, match="there are pictures of 52000000 pixels"):
        marked(asked(openai(large), openai(other)))


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
    _, [one] = marked(asked(openai(lying)))
    upright = Image.open(io.BytesIO(one.data))
    assert upright.size == (one.picture.width, one.picture.height) == ((80, 30) if turned == 3 else (30, 80))
    assert upright.getexif().get(0x0112, 1) == 1
    assert hashlib.sha256(one.data).hexdigest() == one.picture.sha256
    _, [again] = marked(asked(openai(one.data)))
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
        marked(asked({"type": "text", "text": "see"}, part))
    assert "messages[0].content[1]" in str(refused.value)


def test_too_many_pictures_are_refused() -> None:
    with pytest.raises(BadRequest, match="over 64 pictures"):
        marked(asked(*[openai(BLUE) for _ in range(65)]))


@pytest.mark.parametrize(
    "part", [{"type": "image_url"}, {"type": "image", "source": 3}, {"type": "image_url", "image_url": {}}]
)
def test_a_malformed_part_is_left_to_the_dialect_that_refuses_it(part: dict[str, Any]) -> None:
    body, shown = marked(asked(part))
    assert body["messages"][0]["content"] == [part]
    assert shown == ()
