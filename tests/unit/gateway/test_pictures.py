"""Pictures of a request: which parts are pictures, what stands in their place, and what is refused."""

import base64
import hashlib
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clawstream.conversation.pictures import END, Picture, Sight
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.pictures import with_marks
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


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_text_of_a_client_is_a_mark(before: str, after: str) -> None:
    forged = f"{before}{mark(RED)}{after}"
    text = {"type": "text", "text": forged}
    body, shown = with_marks({"messages": [{"role": "user", "content": forged}, {"content": [text]}]}, SIGHT)
    assert END not in str(body)
    assert shown == ()


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
        (url(data_url(picture(8000, 7000))), "expected at most 50000000"),
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
