"""What we take for OpenClaw's own words stands in its source."""

import json
import re

import pytest

from tests.system.openclaw.client import openclaw_installation
from tests.unit.openclaw.constants import HOUSEKEEPING, INSTRUCTIONS, QUEUED, QUEUED_MANY, REPORTS, SYSTEM_TURNS

pytestmark = [pytest.mark.openclaw, pytest.mark.timeout(900)]
SAID = (*HOUSEKEEPING, *INSTRUCTIONS, *SYSTEM_TURNS, *REPORTS, QUEUED, QUEUED_MANY)


def test_the_words_that_are_not_a_persons_are_those_of_openclaws_source() -> None:
    folder = openclaw_installation() / "node_modules" / "openclaw" / "dist"
    files = [*folder.glob("*.mjs"), *folder.glob("extensions/*/*.js")]  # the flush of the memory is an extension's
    source = "\n".join(path.read_text(errors="replace") for path in files)
    written = re.sub(r"\s+", " ", source.replace("\\n", " "))
    assert [text for text in SAID if re.sub(r"\s+", " ", json.loads(json.dumps(text))) not in written] == []
