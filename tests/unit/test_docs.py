"""The pages are true: links, flags, targets of make, and what is generated."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import runpy
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

import mpitrain
from mpitrain.cli import COMMANDS, main, read_config
from mpitrain.flags import read_flags
from mpitrain.launch.run_target import split
from mpitrain.tools.check import CheckConfig
from mpitrain.tools.sweep.config import read_sweep

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name / "README.md" for name in ("slurm", "pbs", "hostfiles")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            there = page.parent / target if target else page
            assert there.exists(), f"{page}: {target}"
            if anchor:
                assert anchor in anchors_of(there), f"{page}: {target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


@cache
def flags_of(command: str) -> set[str]:
    """Every flag that a subcommand's own help tells."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([*command.split(), "--help-all"]) == 0
    asked = {"--help", "--help-all", "--config", "--version"}
    return set(re.findall(r"--[a-z][a-z-]*", said.getvalue())) | asked


def commands_of(page: Path) -> list[str]:
    """What follows `python -m mpitrain` on a page, lines that go on joined."""
    text = page.read_text().replace("\\\n", " ")
    return re.findall(r"-m mpitrain\b([^`|#>\n]*)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_of_mpitrain_are_real(page: Path) -> None:
    for command in commands_of(page):
        # What jobscript puts into the script stands after --, or another command.
        first, *rest = command.split(" -- ")
        is_mpirun = bool({"hostfile", "supervise", "stage"} & set(first.split()))
        for part in [first] if is_mpirun else [first, *rest]:
            words = part.split()
            named = words[0] if words and words[0][0].isalpha() else "train"
            assert named in COMMANDS, command
            if named == "run":  # what follows the script is its own
                words, _ = split(words[1:])
            flags = {it.partition("=")[0] for it in words if it.startswith("--")}
            flags = {it for it in flags if not it.startswith("--task.")}  # a user's
            assert flags <= flags_of(named), command


TO_READ = re.compile(
    r"^    .*?(mpitrain check|mpitrain sweep|benchmarks/scaling.py)\b([^#>\n]*)", re.M
)


def test_what_ci_does_not_run_of_the_pages_can_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values, too: `tests/jobs/test_docs_commands.py` runs these in `make test-all`."""
    pages = {page: page.read_text().replace("\\\n", " ") for page in PAGES}
    found = [it for text in pages.values() for it in TO_READ.findall(text)]
    assert len({name for name, _ in found}) == 3
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scaling = runpy.run_path(str(ROOT / "benchmarks/scaling.py"))["main"]
    for name, line in found:
        words, _, training = line.partition(" -- ")
        flags, of_training = shlex.split(words), shlex.split(training)
        if name == "mpitrain check":
            read_flags(CheckConfig, flags, program="check", files=False)
        elif name == "benchmarks/scaling.py":
            with pytest.raises(SystemExit) as ended:  # after it has read the others
                scaling([*flags, "--help"])
            assert ended.value.code == 0, line + capsys.readouterr().err
        elif "--best" not in flags:
            read_sweep(flags)
        if of_training[:1] not in ([], ["run"]) and "--task" not in of_training:
            read_config(of_training)


def test_flags_that_go_into_a_pbs_job_are_ones_that_it_takes() -> None:
    files = [*PAGES, *(ROOT / "pbs").glob("*.sh")]
    texts = [re.sub(r"\s+", " ", file.read_text()) for file in files]
    given = {flags for text in texts for flags in re.findall(r'ARGS="(-[^"]+)"', text)}
    assert len(given) >= 2
    for flags in given:
        read_config(flags.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_are_real(page: Path) -> None:
    for target in set(re.findall(r"(?:^    |`)make ([a-z0-9-]+)", page.read_text())):
        asked = subprocess.run(
            ["make", "--dry-run", "--silent", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert asked.returncode == 0, f"{page}: make {target}: {asked.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_gap_to_fill(page: Path) -> None:
    assert "@@" not in page.read_text()


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*/*.md"):
        if page.parent.name != "decisions":
            assert f"({page.relative_to(ROOT / 'docs')})" in index, page


def test_lines_are_short() -> None:
    """But for tables and for commands."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            is_text = not line.startswith(("|", "    ")) and page.name != "CHANGELOG.md"
            assert len(line) <= 100 or not is_text, f"{page}: {line}"


def test_the_page_of_flags_is_what_make_flags_writes() -> None:
    names = runpy.run_path(str(ROOT / "tests/flags_page.py"))
    assert names["PAGE"].read_text() == names["page"](), "run: make flags"


def test_the_page_of_the_api_has_every_name() -> None:
    """Of a wrong name `make docs` fails."""
    page = (ROOT / "docs/reference/api.md").read_text()
    found = set(re.findall(r":: mpitrain\.(\w+)", page))
    assert found == {*mpitrain.__all__} - {"__version__"}


@pytest.mark.parametrize(
    "name", ["init", "Trainer", "Checkpointer", "DataLoader", "default_callbacks"]
)
def test_docstrings_have_every_parameter(name: str) -> None:
    found = getattr(mpitrain, name)
    for parameter in inspect.signature(found).parameters:
        assert f"{parameter}:" in (found.__doc__ or ""), parameter
