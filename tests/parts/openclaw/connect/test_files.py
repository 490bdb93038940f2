"""The file that connecting writes, its backup, and what is left of either after an edit, a cut or a link."""

import json
import stat
from pathlib import Path

import pytest

from clawstream.cli import openclaw
from clawstream.cli.openclaw import openclaw_json
from clawstream.errors import ConfigError
from clawstream.local.openclaw_config import parse
from tests.unit.openclaw.connect.texts import COMMENTED, Run, render


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"HOME": "/h"}, "/h/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_HOME": "/o"}, "/o/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_HOME": "~/o"}, "/h/o/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_HOME": " undefined "}, "/h/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_PROFILE": "work"}, "/h/.openclaw-work/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_PROFILE": "Default"}, "/h/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_STATE_DIR": "/s", "OPENCLAW_HOME": "/o"}, "/s/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_STATE_DIR": "/s", "OPENCLAW_CONFIG_PATH": "~/c.json"}, "/h/c.json"),
    ],
)
def test_the_file_is_looked_for_where_openclaw_looks(environment: dict[str, str], found: str) -> None:
    assert openclaw_json(environment) == Path(found)


def test_without_write_the_change_is_shown_and_nothing_is_changed(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    found = run("connect")
    assert found.exit_code == 0
    assert '+  agents: { defaults: { model: { primary: "clawstream/policy" }, }, },' in found.stdout
    assert "s3cret" not in found.output
    assert (file.read_text(), [one.name for one in file.parent.iterdir()]) == (COMMENTED, ["openclaw.json"])


def test_disconnecting_brings_an_untouched_file_back_byte_for_byte(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    file.chmod(0o640)
    assert run("connect", "--write").exit_code == 0
    written = file.read_text()
    assert parse(written, "")["models"]["providers"]["clawstream"]["apiKey"] == "s3cret"
    assert written.startswith("// mine\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.with_name("openclaw.json.before-clawstream").read_text() == COMMENTED
    again = run("connect", "--write")
    assert (again.stdout, file.read_text()) == ("", written)
    assert run("connect", "--write", "--url", "http://elsewhere").exit_code == 0
    found = run("disconnect")
    assert "s3cret" not in found.output
    assert (file.read_text(), [one.name for one in file.parent.iterdir()]) == (COMMENTED, ["openclaw.json"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert run("disconnect").exit_code == 0


def test_a_file_that_was_not_there_is_made_for_this_user_alone_and_goes_again(run: Run, file: Path) -> None:
    assert run("connect", "--write", "--provider", "mine", "--url", "http://there:5").exit_code == 0
    config = json.loads(file.read_text())
    assert config["models"]["providers"]["mine"]["baseUrl"] == "http://there:5/v1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("disconnect").exit_code == 0
    assert list(file.parent.iterdir()) == []


def test_edits_outlive_another_connection_and_its_end(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    run("connect", "--write", "--url", "http://a")
    file.write_text(file.read_text().replace("// mine\n{", "// mine\n{\n  env: { A: '1' }, // by hand"))
    run("connect", "--write", "--url", "http://b")
    assert parse(file.read_text(), "")["models"]["providers"]["clawstream"]["baseUrl"] == "http://b/v1"
    assert run("disconnect").exit_code == 0
    assert file.read_text() == COMMENTED.replace("{\n", "{\n  env: { A: '1' }, // by hand\n", 1)


def test_after_an_edit_by_hand_only_our_change_is_undone_and_comments_and_the_backup_stay(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    run("connect", "--write")
    file.write_text(file.read_text().replace("// mine\n{", "// mine\n{\n  env: { A: '1' }, // by hand"))
    found = run("disconnect")
    assert found.exit_code == 0
    assert file.read_text() == COMMENTED.replace("{\n", "{\n  env: { A: '1' }, // by hand\n", 1)
    backup = file.with_name("openclaw.json.before-clawstream")
    assert backup.read_text() == COMMENTED
    assert str(backup) in found.stderr
    assert not file.with_name("openclaw.json.clawstream").exists()


def test_a_backup_that_was_kept_is_not_overwritten_by_the_next_connection(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    run("connect", "--write")
    file.write_text(render(parse(file.read_text(), "") | {"env": {"A": "1"}}))  # as OpenClaw writes it: no comments
    run("disconnect")
    assert parse(file.read_text(), "") == parse(COMMENTED, "") | {"env": {"A": "1"}}
    run("connect", "--write")
    run("disconnect")
    assert file.with_name("openclaw.json.before-clawstream.1").read_text() == COMMENTED
    assert not file.with_name("openclaw.json.before-clawstream").exists()


@pytest.mark.parametrize("number", range(3))
def test_wherever_connecting_was_cut_it_is_undone(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    written: list[Path] = []

    def cut(path: Path, text: str, mode: int) -> None:
        if len(written) == number:
            raise ConfigError("no space left")
        written.append(path)
        replace_file(path, text, mode)

    replace_file = openclaw._replace
    with monkeypatch.context() as broken:
        broken.setattr(openclaw, "_replace", cut)
        assert run("connect", "--write").exit_code == 1
    assert run("disconnect").exit_code == 0
    assert parse(file.read_text(), "") == parse(COMMENTED, "")
    assert run("connect", "--write").exit_code == 0
    assert run("disconnect").exit_code == 0
    assert parse(file.read_text(), "") == parse(COMMENTED, "")


def test_a_link_stays_a_link(run: Run, file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    real = tmp_path / "real.json"
    real.write_text("{}")
    file.symlink_to(real)
    run("connect", "--write")
    assert file.is_symlink()
    assert "clawstream" in real.read_text()


def test_a_file_that_can_not_be_read_is_an_operator_s_error(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{ agents: ")
    assert isinstance(run("connect", "--write").exception, ConfigError)
    assert file.read_text() == "{ agents: "
    file.unlink()
    file.mkdir()
    assert isinstance(run("connect").exception, ConfigError)


def test_an_agent_with_a_model_of_its_own_is_named(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text('{"agents": {"entries": {"ops": {"model": "openai/gpt"}, "home": {}}}}')
    found = run("connect")
    assert "agent ops names a model of its own" in found.stderr
    assert "agent home" not in found.stderr
