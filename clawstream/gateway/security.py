"""Who may ask: one bearer key, compared in constant time and never logged."""

import hmac

from pydantic import SecretStr

from clawstream.gateway.refusal import BadRequest


def check_key(authorization: str | None, api_key: SecretStr | None) -> None:
    """Raise BadRequest (401) unless the header carries the key; without a key, everybody on this machine may ask."""
    if api_key is None:
        return
    scheme, _, found = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not found:
        raise BadRequest(
            "No API key was sent; expected the header `Authorization: Bearer KEY` with gateway.api_key.",
            status=401,
            code="missing_api_key",
        )
    if not hmac.compare_digest(found.strip().encode(), api_key.get_secret_value().encode()):
        raise BadRequest(
            "The API key is not the one of this gateway; use gateway.api_key of its settings.",
            status=401,
            code="invalid_api_key",
        )
