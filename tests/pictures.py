"""Pictures as clients send them."""

import base64
import io
from typing import Any

from PIL import Image


def picture(width: int, height: int, *, form: str = "PNG", red: int = 200, **said: Any) -> bytes:
    """Return a picture's bytes; `said` goes into the file."""
    written = io.BytesIO()
    Image.new("RGB", (width, height), (red, 30, 30)).save(written, format=form, **said)
    return written.getvalue()


def data_url(data: bytes, media: str = "image/png") -> str:
    """Return the bytes as clients send them."""
    return f"data:{media};base64,{base64.b64encode(data).decode()}"
