"""The gateway's tokenizer, for those who mean it no good."""

from tests.parts.gateway.conftest import renderer, tokenizer_folder

__all__ = ["renderer", "tokenizer_folder"]
