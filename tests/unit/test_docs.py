"""What the pages point to is there."""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from mpitrain.cli import COMMANDS
from mpitrain.flags import flat
from mpitrain.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name / "README.md" for name in ("slurm", "pbs", "hostfiles")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_of_mpitrain_are_real(page: Path) -> None:
    known = {"--" + f.replace("_", "-") for f in flat(asdict(TrainConfig()))}
    known |= {"--config", "--help", "--version"}
    for line in page.read_text().splitlines():
        command = re.search(r"-m mpitrain\b([^`|#]*)", line)
        if command:
            words = command[1].split()
            assert {w for w in words if w.startswith("--")} <= known, line
            if words and words[0][0].isalpha() and line.startswith("    "):
                assert words[0] in COMMANDS, line


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
