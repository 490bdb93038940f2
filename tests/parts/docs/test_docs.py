"""What README, the files beside it and docs/ say leads somewhere: links, commands, options and settings."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from clawstream import __version__, cli
from clawstream.config import load

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests/bench/results/README.md",
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?<![\w/.-])(?<!-n )(?:clawstream|cs) (?:-c \S+ )?([a-z][^\"'#]*)")
NAMED = re.compile(r"\bdocs/[\w-]+\.md")
NAMING = ("clawstream/**/*.py", "deploy/**/*", "tests/**/*.py", "migrations/**/*.sql", "topics/*", "schemas/*.avsc")
COMMANDS = get_command(cli.app)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    found = LINK.findall(INLINE.sub("", prose(page)))
    return [link for link in found if not link.startswith(("https://", "http://", "mailto:"))]


def anchors(page: Path) -> set[str]:
    """Return what GitHub names the headings of a page."""
    slugs: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?)$", prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{slug}-{slugs[slug]}" if slugs[slug] else slug)
        slugs[slug] += 1
    return found


def settings(page: Path) -> list[str]:
    """Return the blocks of settings that a page shows."""
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == "toml"]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command of ours that a page shows, in blocks and in lines, up to a quoted one."""
    blocks = [body for kind, body in FENCE.findall(page.read_text()) if kind == "console"]
    typed = [line for body in blocks for line in body.replace("\\\n", " ").splitlines() if re.match(r"\w*\$ ", line)]
    for line in (*typed, *(code.replace("\n", " ") for code in INLINE.findall(prose(page)))):
        yield from (words.split() for words in COMMAND.findall(line))


def with_any(found: Callable[[Path], Iterable[T]]) -> pytest.MarkDecorator:
    """Run a test for each page that has something to look at, with what it has; some page has to."""
    cases = [pytest.param(page, has, id=page.relative_to(ROOT).as_posix()) for page in PAGES if (has := [*found(page)])]
    assert cases, f"no page has {found.__name__}"
    return pytest.mark.parametrize(("page", "has"), cases)


@with_any(links)
def test_every_link_leads_to_a_page_or_a_heading_that_is_there(page: Path, has: list[str]) -> None:
    for link in has:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert not anchor or anchor in anchors(target), f"{link}: {sorted(anchors(target))}"


def test_the_readme_links_every_page_of_docs() -> None:
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= set(links(README))


def test_a_drawn_picture_fetches_nothing() -> None:
    pictures = [*(ROOT / "docs").glob("*.svg")]
    assert pictures, "no picture is drawn: where is the README's?"
    assert not [picture.name for picture in pictures if re.search(r"url\([^#]|@import|href=", picture.read_text())]


def test_pages_that_code_and_deployment_name_are_there() -> None:
    named = {
        (name, file)
        for pattern in NAMING
        for file in ROOT.glob(pattern)
        if file.is_file()
        for name in NAMED.findall(file.read_text())
    }
    assert named, "nothing names a page: look where pages are named"
    assert not [(name, str(file)) for name, file in named if not (ROOT / name).is_file()]


@with_any(commands)
def test_commands_and_options_that_a_page_shows_are_there(page: Path, has: list[list[str]]) -> None:
    for words in has:
        command = COMMANDS
        for word in words:
            if not isinstance(command, TyperGroup):
                break
            assert word in command.commands, f"{words}: {command.name} has no {word}"
            command = command.commands[word]
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        known = {name for parameter in command.params for name in parameter.opts}
        assert options <= known, f"{page.name}: {words}: {command.name} has {sorted(known)}"


@with_any(settings)
def test_settings_that_a_page_shows_are_settings_there_are(page: Path, has: list[str], tmp_path: Path) -> None:
    for number, body in enumerate(has):
        file = tmp_path / f"{page.stem}-{number}.toml"
        file.write_text(body)
        load(file)


def test_the_readme_s_alias_runs_this_checkout_from_any_folder(tmp_path: Path) -> None:
    [alias] = re.findall(r"^\$ (alias clawstream=.*)$", README.read_text(), re.MULTILINE)
    checkout = tmp_path / "a checkout"
    checkout.symlink_to(ROOT)
    script = f"shopt -s expand_aliases\ncd '{checkout}'\n{alias}\ncd /\nclawstream --version\n"
    there = {"UV_NO_SYNC": "1", "UV_PROJECT_ENVIRONMENT": sys.prefix}  # the environment that this test runs in
    ran = subprocess.run(["bash", "-c", script], env=os.environ | there, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, __version__), ran.stderr
