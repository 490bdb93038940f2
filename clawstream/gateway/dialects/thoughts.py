"""Reasoning as `encrypted_content`, for clients that send no readable reasoning back. Pure.

It is no secret, since the client has the text beside it; but it comes back whole from such clients.
"""

import base64
import binascii

from clawstream.gateway.requests.refusal import BadRequest

SEALED = "clawstream-"


def sealed(thought: str) -> str:
    """Return the thought as an opaque string."""
    return SEALED + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode("ascii")


def opened(text: str, where: str) -> str:
    """Return the thought that `sealed` was given. Raises BadRequest for a string that `sealed` did not make."""
    try:
        return base64.b64decode(text.removeprefix(SEALED), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise BadRequest(f"{where} was changed since it was sent; send reasoning as it came.", param=where) from error
