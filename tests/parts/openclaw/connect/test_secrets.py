"""What the shown change hides: every secret, and what comments say."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from clawstream.local.openclaw_config import diff, parse
from tests.unit.openclaw.connect.texts import Run, render


def test_what_a_comment_says_is_never_shown(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{\n  // was sk-abcdef before\n  /* and\n sk-ghijkl */\n  a: 1, // my key: 'sk-mnopqr'\n}\n")
    found = run("connect")
    assert "clawstream/policy" in found.stdout
    assert "sk-" not in found.output


SECRETS = """{
  // my old apiKey: 'LEAK-comment', don't use
  apiKey: 'LEAK-single', "botToken" : "LEAK-\\"double", /* password = LEAK-block */
  channels: { telegram: { botToken: /* why */
      'LEAK-next-line', AUTH_TOKEN: "LEAK-upper", maxTokens: 8192 } },
  secrets: { shown: ["LEAK-list", { name: "LEAK-inner" }] }, after: "seen",
  OPENAI_API_KEY: 'LEAK-two\\
lines', providers: [{ password: "LEAK-password", id: "also seen" }],
}
"""


def test_no_secret_of_a_file_is_shown_on_either_side_of_the_change() -> None:
    before = {"apiKey": "one", "secret": {"a": ["LEAK-json"]}, "token": "\ud800", "id": "plain"}
    for old, new in ((SECRETS, render(parse(SECRETS, ""))), (render(before), "{}"), ("", SECRETS)):
        shown = diff(old, new, "openclaw.json")
        assert "LEAK" not in shown
        assert "\0" not in shown
    shown = diff(SECRETS, render(parse(SECRETS, "")), "openclaw.json")
    for plain in ("8192", '"seen"', '"also seen"', '"name": "***"', '"maxTokens"'):
        assert plain in shown


def test_a_change_of_the_key_alone_is_still_a_change() -> None:
    shown = diff('{"apiKey": "old"}\n', '{"apiKey": "new"}\n', "openclaw.json")
    assert shown.splitlines()[-2:] == ['-{"apiKey": "***"}', '+{"apiKey": "***"}']
    assert diff('{"apiKey": "old"}', '{"apiKey": "old"}', "openclaw.json") == ""


@given(st.dictionaries(st.sampled_from(["apiKey", "botToken", "clientSecret", "PASSWORD"]), st.text(max_size=5)))
def test_what_is_hidden_is_what_the_file_holds(found: dict[str, str]) -> None:
    config = {"plugins": [{name: f"LEAK{value}" for name, value in found.items()}]}
    assert "LEAK" not in diff(json.dumps(config), render(config), "openclaw.json")


def test_a_new_key_does_not_show_the_old_one(run: Run) -> None:
    assert run("connect", "--write", "--key", "cs-old").exit_code == 0
    found = run("connect", "--key", "cs-new")
    assert (found.exit_code, '+        "apiKey": "***"' in found.stdout or '"apiKey": "***"' in found.stdout) == (
        0,
        True,
    )
    assert "cs-old" not in found.output
    assert "cs-new" not in found.output
