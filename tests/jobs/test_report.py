"""A report of real runs, seen in a real browser at two widths and in both schemes."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from browser import Browser
from launcher import Done, Mpi, children_of, environment, mpirun
from PIL import Image

from mpitrain.record.reading import Run
from mpitrain.tools.report.analysis import jobs_of, seconds_by_category
from mpitrain.tools.report.summary import findings

pytestmark = [
    pytest.mark.xdist_group("report"),  # a fixture that trains, once
    pytest.mark.usefixtures("warm_starts"),
]

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
CHARTS = ("loss", "accuracy", "ranks", "throughput", "learning-rate")
PACED = ("--model", "slow_loop:SlowModel", "--lr", "0.1", "--device", "cpu")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser.provide()
    with browser.opened(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


def train(
    mpi: Mpi, num_ranks: int, name: str, folder: Path, *more: str, **variables: str
) -> Done:
    words = ("-m", "mpitrain", "--name", name, *more)
    return mpirun(mpi, num_ranks, *words, cwd=folder, **variables)


@pytest.fixture(scope="module")
def plain(openmpi: Mpi, folder: Path) -> Path:
    done = train(openmpi, 2, "plain", folder, "--epochs", "4", "--device", "cpu")
    assert done.status == 0, done.err
    return folder / "runs/plain"


@pytest.fixture(scope="module")
def hung(openmpi: Mpi, folder: Path) -> Path:
    """Rank 2 is slow, and then stands still in its forward pass."""
    variables = {"PACE": "0.01", "SLOW_RANK": "2", "SLOW": "0.02", "HANG_STEP": "90"}
    variables["MPITRAIN_FORK_SERVER"] = "none"
    words = (*PACED, "--epochs", "9", "--hang-timeout", "4")
    done = train(openmpi, 3, "hung", folder, *words, **variables)
    assert done.status == 76, done.err
    return folder / "runs/hung"


@pytest.fixture(scope="module")
def chain(openmpi: Mpi, folder: Path) -> Path:
    """Stopped, and gone on with by another number of ranks."""
    stop = folder / "runs/chain/stop"
    words = (*PACED, "--epochs", "9", "--checkpoint-every-steps", "20")
    first = subprocess.Popen(
        [
            *(str(openmpi.mpirun), "-np", "3", *openmpi.flags, sys.executable),
            *("-m", "mpitrain", "--name", "chain", *words),
        ],
        cwd=folder,
        env=environment(openmpi, PACE="0.03"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    metrics = folder / "runs/chain/metrics.jsonl"
    end = time.monotonic() + 90
    while not metrics.exists() or '"epoch", ' not in metrics.read_text():
        assert time.monotonic() < end
        time.sleep(0.1)
    stop.touch()
    assert first.wait(60) == 75
    stop.unlink()
    done = train(openmpi, 2, "chain", folder, *words)
    assert done.status == 0, done.err
    return folder / "runs/chain"


def report(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "report", *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


LUMINANCE = """
const ratio = (a, b) => {
  const of = c => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [dark, light] = [of(a), of(b)].sort((x, y) => x - y);
  return (light + 0.05) / (dark + 0.05);
};
const behind = e => {
  for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (c !== 'rgba(0, 0, 0, 0)') return c;
  }
};
const texts = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const e = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || !e.checkVisibility()) continue;
  const style = getComputedStyle(e);
  const colour = e.closest('svg') ? style.fill : style.color;
  if (e.closest('svg') && style.fontWeight >= 600) continue;  // on a colour of its own
  texts.push([ratio(colour, behind(e)), walk.currentNode.data.trim()]);
}
return texts.sort((a, b) => a[0] - b[0]).slice(0, 3);
"""


def check(opened: Browser, page: Path, charts: tuple[str, ...], tmp_path: Path) -> None:
    """Look at a page as people do: on a phone by day, and on a screen by night."""
    seen = {}
    for width, scheme in zip(WIDTHS, SCHEMES, strict=True):
        opened.open(page, width=width, scheme=scheme)
        assert opened.requests() == [page.absolute().as_uri()]
        wide = opened.ask("return document.documentElement.scrollWidth")
        assert wide <= width, f"{width}: scrolls to {wide}"
        for chart in charts:
            shown = opened.ask(
                """
                const figure = document.getElementById(arguments[0]);
                const all = [...figure.querySelectorAll('svg')];
                const svgs = all.filter(it => it.checkVisibility());
                const box = svgs[0].getBoundingClientRect();
                const words = figure.querySelector('[role=img]').ariaLabel;
                const scroll = figure.querySelector('.scroll');
                const scrolls = scroll.scrollWidth > scroll.clientWidth;
                return [svgs.length, box.width, box.height, box.right, words, scrolls];
                """,
                chart,
            )
            num, box_width, box_height, right, words, scrolls = shown
            assert num == 1, chart
            assert box_width > 300
            assert box_height > 80
            assert right <= width or scrolls
            assert words
            sizes = opened.ask(
                "return [...document.getElementById(arguments[0])"
                ".querySelectorAll('svg text')].filter(it => it.checkVisibility())"
                ".map(it => it.getBoundingClientRect().height)",
                chart,
            )
            assert min(sizes) > 10, f"{chart} has text too small at {width}"
        (ratio, text), *_ = opened.ask(LUMINANCE)
        assert ratio >= 4.5, f"{text!r} has a contrast of {ratio:.2f} in {scheme}"
        seen[scheme] = tmp_path / f"{scheme}.png"
        opened.picture(seen[scheme])
        for chart in charts:
            assert num_colours(opened, chart, seen[scheme]) > 4, chart
    light, dark = (Image.open(seen[it]).convert("L").getpixel((2, 2)) for it in SCHEMES)
    assert light > 240
    assert dark < 50


def num_colours(opened: Browser, chart: str, picture: Path) -> int:
    """Count the colours of a chart on a picture of the page.

    A blank chart has one, an empty one two (paper and grid). Bars on whole pixels
    have few besides: no line of theirs is smoothed.
    """
    box = opened.ask(
        "const svg = [...document.querySelectorAll(`[id='${arguments[0]}'] svg`)]"
        ".find(it => it.checkVisibility()); const b = svg.getBoundingClientRect();"
        "return [b.left, b.top + scrollY, b.right, b.bottom + scrollY]",
        chart,
    )
    part = Image.open(picture).convert("RGB").crop(tuple(round(it) for it in box))
    return len(part.getcolors(1 << 24) or [])


def test_a_plain_run_looks_well(opened: Browser, plain: Path, tmp_path: Path) -> None:
    said = report(plain)
    where = said.splitlines()[-1]  # the lines before it are what the run cost
    assert where.startswith(f"{plain}/report.html, 5 pictures in {plain}/report/")
    assert f"scp {os.uname().nodename}:{plain}/report.html" in said
    check(opened, plain / "report.html", CHARTS, tmp_path)
    for chart in CHARTS:
        picture = Image.open(io.BytesIO((plain / f"report/{chart}.png").read_bytes()))
        assert picture.width > 1200
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 4
    run = Run(plain)
    (job,) = jobs_of(run)
    seconds = seconds_by_category([job], run.metrics.throughputs)
    assert sum(seconds.values()) == pytest.approx(job.seconds, abs=1.0)
    assert "finished" in opened.ask("return document.querySelector('h1').innerText")


@pytest.mark.slow
def test_a_slow_rank_and_a_hang_are_seen(
    opened: Browser, hung: Path, tmp_path: Path
) -> None:
    run = Run(hung)
    (job,) = jobs_of(run)
    first, *_ = findings([job], run.metrics.throughputs)
    assert re.match(r"Rank 2 \(.*\) was the last in \d+ % of the steps", first)
    assert job.hanging_ranks() == [2]
    assert job.killed_ranks() == []
    cut = job.ranks[2].cut
    assert cut is not None
    assert 3.5 < cut.seconds < 12
    report(hung)
    check(opened, hung / "report.html", CHARTS, tmp_path)
    words = opened.ask("return document.getElementById('ranks').innerText")
    assert "rank 2" in words.lower()
    assert "hung in forward for" in words
    error = opened.ask("return document.querySelector('.error').innerText")
    assert "hang: no rank has made progress" in error


@pytest.mark.slow
def test_a_run_that_went_on_is_one_run_of_two_jobs(
    opened: Browser, chain: Path, tmp_path: Path
) -> None:
    run = Run(chain)
    assert [job.world_size for job in jobs_of(run)] == [3, 2]
    assert len(run.metrics.resumed) == 1
    assert run.checkpoints
    report(chain)
    check(opened, chain / "report.html", CHARTS, tmp_path)
    labels = opened.ask(
        "return [...document.querySelectorAll('#ranks text')].map(it => it.textContent)"
    )
    assert any(it.startswith("job 1: 3 ranks") for it in labels)


@pytest.mark.slow
def test_a_report_while_the_run_is_running(openmpi: Mpi, tmp_path: Path) -> None:
    words = (*PACED, "--epochs", "200", "--name", "r")
    job = subprocess.Popen(
        [
            *(str(openmpi.mpirun), "-np", "2", *openmpi.flags),
            *(sys.executable, "-m", "mpitrain", *words),
        ],
        cwd=tmp_path,
        env=environment(openmpi, PACE="0.01"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        metrics = tmp_path / "runs/r/metrics.jsonl"
        end = time.monotonic() + 90
        while not metrics.exists() or '"epoch", ' not in metrics.read_text():
            assert time.monotonic() < end
            time.sleep(0.1)
        for _ in range(3):
            report(tmp_path / "runs/r", "--no-pictures")
            page = (tmp_path / "runs/r/report.html").read_text()
            assert "the last line is" in page
            assert ">running</span>" in page
        assert job.poll() is None
        assert children_of(job.pid)
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(60)
