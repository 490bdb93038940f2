"""Reasoning on its way through a client that keeps none of it readable: `encrypted_content`. Pure.

It is no secret, the client has the text beside it; it comes back whole from clients that send nothing else back.
"""

import base64
import binascii

from clawstream.gateway.requests.refusal import BadRequest

SEALED = "clawstream-"


def sealed(thought: str) -> str:
    """Return the thought as an opaque string."""
    return SEALED + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode("ascii")


def opened(text: str, where: str) -> str:
    """Return what `sealed` was given. Raises BadRequest for what it did not make."""
    try:
        return base64.b64decode(text.removeprefix(SEALED), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise BadRequest(f"{where} was changed since it was sent; send reasoning as it came.", param=where) from error
