"""What a report shows is what the files say, whatever stands in them."""

from __future__ import annotations

import itertools
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from made_runs import BEGAN, LOAD_SECONDS, START_SECONDS, Part, make_run

from mpitrain.errors import UsageError
from mpitrain.record.rank_times import COMMUNICATION, FORWARD
from mpitrain.record.reading import Run
from mpitrain.tools.report import words
from mpitrain.tools.report.config import ReportConfig
from mpitrain.tools.report.facts import (
    SHARES,
    STAGES,
    jobs_of,
    lateness,
    shares,
    stage_seconds,
)
from mpitrain.tools.report.map_chart import pixels, rank_labels, time_ticks
from mpitrain.tools.report.rank_map import MOST_ROWS, cells, rank_map, strip_of
from mpitrain.tools.report.report import MOST_RUNS, report
from mpitrain.tools.report.series import finite, largest, rates, smooth, thinned
from mpitrain.tools.report.style import COLOURS, luminance

CHAIN = (
    Part(world_size=8, last=120, slow_rank=5, ends="hang", bad_rank=5),
    Part(world_size=6, first=81, last=160, ends="stopped", bad_rank=2),
    Part(world_size=3, first=101, last=200),
)
"""A hang on 8 ranks, one killed of 6, and the end with 3; some steps twice."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "chain", CHAIN)


def test_jobs_are_put_together_from_what_their_ranks_wrote(chain: Path) -> None:
    jobs = jobs_of(Run(chain))
    assert [job.world_size for job in jobs] == [8, 6, 3]
    assert [sorted(job.ranks) for job in jobs] == [list(range(n)) for n in (8, 6, 3)]
    assert jobs[0].began == pytest.approx(BEGAN + 60)
    for before, after in itertools.pairwise(jobs):
        assert before.ended < after.began
    assert [job.num_nodes for job in jobs] == [2, 2, 1]


def test_a_rank_without_a_file_does_not_part_a_job(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=4), Part(world_size=4, first=150)))
    (path / "times/rank-0.jsonl").unlink()
    jobs = jobs_of(Run(path))
    assert [sorted(job.ranks) for job in jobs] == [[1, 2, 3], [1, 2, 3]]


def test_the_stages_of_a_rank_add_up_to_its_time(chain: Path) -> None:
    for job in jobs_of(Run(chain)):
        for part in job.ranks.values():
            wall = part.ended - (part.time - part.start_seconds)
            seconds = stage_seconds(part)
            assert seconds.sum() == pytest.approx(wall, abs=1e-6)
            assert seconds[0] == pytest.approx(START_SECONDS + LOAD_SECONDS, abs=0.01)
            assert (seconds > -0.01).all()  # what rounding leaves


def test_shares_add_up_to_the_time_of_the_jobs(chain: Path) -> None:
    run = Run(chain)
    jobs = jobs_of(run)
    paces = run.metrics.paces
    of_each = [shares([job], paces) for job in jobs]
    of_all = shares(jobs, paces)
    for name, seconds in of_all.items():
        assert seconds == pytest.approx(sum(of[name] for of in of_each))
    for job, of in zip(jobs, of_each, strict=True):
        walls = [it.ended - it.time + it.start_seconds for it in job.ranks.values()]
        assert sum(of.values()) == pytest.approx(np.mean(walls), abs=1e-3)
    # Of the hang 8 s were waited by 7 of 8 ranks, and the slow one made them wait, too.
    assert of_each[0]["waiting"] > 7.0
    assert of_each[0]["communication"] < 3.0


def test_each_step_is_told_once_and_is_of_one_job(chain: Path) -> None:
    run = Run(chain)
    assert list(run.metrics.steps.step) == list(range(1, 201))
    assert [it.epoch for it in run.metrics.epochs] == [1, 2, 3, 4]
    jobs = jobs_of(run)
    for pace in run.metrics.paces:
        assert sum(job.holds(pace.time) for job in jobs) == 1


def test_the_straggler_is_found_and_nobody_is_accused_without_one(
    tmp_path: Path,
) -> None:
    slow = Run(make_run(tmp_path / "slow", (Part(world_size=8, slow_rank=6),)))
    (job,) = jobs_of(slow)
    found = lateness(job, slow.metrics.paces)
    assert found is not None
    assert (found.rank, found.hostname, found.stands_out) == (6, "gpu01", True)
    paces = slow.metrics.paces
    late = sum(it.late_seconds for it in paces) / sum(it.seconds for it in paces)
    assert found.late_share == pytest.approx(late)
    assert "Rank 6 (gpu01) was the last in 100 % of the steps" in words.ranks(
        [job], slow.metrics.paces
    )
    even = Run(make_run(tmp_path / "even", (Part(world_size=8),)))
    found = lateness(jobs_of(even)[0], even.metrics.paces)
    assert found is not None
    assert not found.stands_out
    assert (
        "no rank stands out" in words.ranks(jobs_of(even), even.metrics.paces).lower()
    )


def test_who_the_others_waited_for_at_the_end_is_named(chain: Path) -> None:
    hung, killed, finished = jobs_of(Run(chain))
    assert (hung.culprits(), hung.silent()) == ([5], [])
    assert (killed.culprits(), killed.silent()) == ([], [2])
    assert (finished.culprits(), finished.silent()) == ([], [])
    said = words.ranks([hung, killed, finished], Run(chain).metrics.paces)
    assert "job 1 was ended, rank 5 (gpu01) was in its forward pass for 8.0 s" in said
    assert "job 2 was ended, rank 2 (gpu00) left no last word" in said


def test_ranks_that_were_ended_by_another_are_not_called_killed(tmp_path: Path) -> None:
    part = Part(world_size=4, ends="raise", bad_rank=1)
    (job,) = jobs_of(Run(make_run(tmp_path / "r", (part,), status="failed")))
    assert (job.silent(), job.culprits(), job.last_words()) == ([], [], [1])
    assert "rank 1 (gpu00) was in its forward pass" in words.ending(job, False)


def test_every_cell_of_the_map_belongs_to_one_job_and_is_whole(chain: Path) -> None:
    jobs = jobs_of(Run(chain))
    found = rank_map(jobs, 400)
    assert found.shares.shape[:2] == (8, 400)
    sums = found.shares.sum(-1)
    assert sums.max() < 1 + 1e-6
    strip = found.strip
    assert all(a < b for a, b in itertools.pairwise(
        itertools.chain.from_iterable(zip(strip.lefts, strip.rights, strict=True))
    ))  # fmt: skip
    for job, left, right in zip(jobs, strip.lefts, strip.rights, strict=True):
        inside = slice(round(left * 400) + 1, round(right * 400) - 1)
        there = sums[: job.world_size, inside]
        is_known = ~found.is_missing[: job.world_size, inside]
        # But for the cell in which the last line of the killed one lies.
        assert (abs(there[is_known] - 1) > 1e-3).sum() <= len(job.silent())
        assert (sums[job.world_size :, inside] == 0).all()


def test_the_map_shows_the_straggler_the_hang_and_the_killed(chain: Path) -> None:
    jobs = jobs_of(Run(chain))
    found = rank_map(jobs, 400)
    alpha = pixels(found)[..., 3].astype(int)
    left, right = (round(it[0] * 400) for it in (found.strip.lefts, found.strip.rights))
    trained = slice(left + round(0.7 * (right - left)), right - 1)
    means = alpha[:, trained].mean(1)
    assert means.argmax() == 5
    assert means[5] > 1.3 * np.delete(means, 5).max()
    assert found.is_culprit[5].any()
    assert not np.delete(found.is_culprit, 5, 0).any()
    assert found.is_missing[2].any()
    assert not np.delete(found.is_missing, 2, 0).any()


def test_what_all_ranks_spend_in_communication_is_seen(chain: Path) -> None:
    """The rest of it is waiting for the slow rank, which waits for nobody."""
    found = rank_map(jobs_of(Run(chain)), 400)
    communication, both = found.communication, found.shares[..., 1 + COMMUNICATION]
    assert communication.max() > 0.01
    assert (communication <= both + 1e-12).all()
    trained = communication[0] > 0.01
    trained[round(found.strip.rights[0] * 400) - 1 :] = False  # of the first job alone
    assert np.allclose(communication[5, trained], both[5, trained])
    assert both[0, trained].mean() > 2 * communication[0, trained].mean()


def test_no_two_colours_of_the_map_can_be_mistaken() -> None:
    names = (*STAGES, "hang")
    for one, other in itertools.combinations(names, 2):
        for paper in (0, 1):
            pair = (COLOURS[one][paper], COLOURS[other][paper])
            first, second = ([int(it[i : i + 2], 16) for i in (1, 3, 5)] for it in pair)
            apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
            assert apart > 35, (one, other, pair)


def test_of_thousands_of_ranks_the_slow_one_is_still_seen(tmp_path: Path) -> None:
    part = Part(world_size=1500, last=6, slow_rank=777, slower=2.0, step_seconds=8.0)
    path = make_run(tmp_path / "r", (part,), ranks_per_node=8)
    found = rank_map(jobs_of(Run(path)), 100)
    assert len(found.shares) <= MOST_ROWS
    waits = found.shares[..., 1 + COMMUNICATION].mean(1)
    assert waits.argmin() == 777 // found.ranks_per_row
    places, labels = rank_labels(jobs_of(Run(path))[0], found.ranks_per_row)
    assert len(places) == len(labels) <= 24


def test_what_a_rank_did_between_two_times_adds_up(chain: Path) -> None:
    job = jobs_of(Run(chain))[0]
    part = job.ranks[5]
    for num in (1, 7, 1000):
        times = np.linspace(job.began, job.ended, num + 1)
        found = cells(part, times) * np.diff(times)[:, None]
        assert found.sum() == pytest.approx(job.wall_seconds, abs=1e-3)
        assert found.sum(0) == pytest.approx(stage_seconds(part), abs=0.02)
    last = cells(part, np.array([job.ended - 8.0, job.ended]))[0]
    assert last[1 + FORWARD] == pytest.approx(1.0, abs=1e-3)


def test_marks_of_time_are_apart_and_lie_within_jobs(chain: Path) -> None:
    strip = strip_of(jobs_of(Run(chain)))
    ticks = time_ticks(strip, 7)
    places = [place for place, _ in ticks]
    assert 1 < len(places) <= 10
    assert places == sorted(places)
    for place in places:
        assert any(
            left <= place <= right
            for left, right in zip(strip.lefts, strip.rights, strict=True)
        )


def test_thinned_series_keep_ends_and_extremes() -> None:
    numbers = np.random.default_rng(1)
    for num in (0, 1, 5, 400, 100_001):
        x, y = np.arange(num, dtype=float), numbers.normal(size=num)
        xs, ys = thinned(x, y, 100)
        assert len(xs) <= max(400, 4 * 100)
        if num:
            assert (xs[0], xs[-1], ys.min(), ys.max()) == (0, num - 1, y.min(), y.max())
            assert (np.diff(xs) > 0).all()
            mean_x, mean_y = smooth(x, y, 50)
            assert y.min() <= mean_y.min() <= mean_y.max() <= y.max()
            assert (np.diff(mean_x) > 0).all()


def test_numbers_that_are_none_are_left_out() -> None:
    x, y = finite([1, 2, 3], [0.5, np.nan, np.inf])
    assert (x.tolist(), y.tolist()) == ([1.0], [0.5])


def test_rates_count_long_steps_as_long(chain: Path) -> None:
    paces = Run(chain).metrics.paces
    for num in (1, 3, 1000):
        steps, samples, seconds = rates(paces, num)
        assert len(steps) == len(samples) == len(seconds) <= len(paces)
        assert steps[-1] == 200
    (mean,) = rates(paces, 1)[1]
    assert mean == pytest.approx(
        sum(it.num_samples for it in paces) / sum(it.seconds for it in paces)
    )
    assert [len(it) for it in rates([], 5)] == [0, 0, 0]


def test_the_largest_of_each_bin_is_kept() -> None:
    x, y = largest(np.arange(100.0), np.arange(100.0), 10)
    assert y[-1] == 99
    assert len(x) == 10
    assert len(largest(np.zeros(0), np.zeros(0), 10)[0]) == 0


def written(path: Path, *more: Path) -> str:
    output = path / "report.html"
    report(ReportConfig(runs=(path, *more), output=output, pictures=False))
    return output.read_text()


def test_the_page_asks_nobody_for_anything(chain: Path) -> None:
    page = written(chain)
    assert "<b>87.50 %</b><span>best accuracy in validation</span>" in page
    loads = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert loads
    assert all(it.startswith(("#", "data:")) for it in loads)
    assert "<script" not in page
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page
    assert not re.findall(r"#fe[0-9a-f]{4}", page)  # each colour has its name
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for used in re.findall(r"var\(--([a-z0-9-]+)\)", page):
        assert used in COLOURS


EVIL = "<script>alert(1)</script>&\"'$x^2$"


def test_whatever_stands_in_a_file_is_text_on_the_page(tmp_path: Path) -> None:
    path = make_run(
        tmp_path / "<b>run",
        (Part(world_size=3, slow_rank=1, ends="hang", bad_rank=1),),
        hostname=EVIL,
        status="failed",
        error=EVIL,
    )
    (path / "config.yaml").write_text(f"name: {EVIL!r}\n{EVIL!r}: 1\ndata: [1, 2]\n")
    page = written(path)
    assert "<script" not in page
    assert "<b>run" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4
    two = make_run(tmp_path / "two", (Part(world_size=2),), hostname=EVIL)
    page = written(two, path)
    assert "<script" not in page


@pytest.mark.parametrize(
    "left",
    [
        {"config.yaml"},
        {"run.json", "metrics.jsonl"},
        {"metrics.jsonl"},
        {"times", "result.json"},
        {"config.yaml", "times"},
    ],
    ids=lambda names: ",".join(sorted(names)),
)
def test_a_run_of_which_little_is_there_has_a_page(
    tmp_path: Path, left: set[str]
) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=3, last=40),))
    for file in sorted(path.rglob("*"), reverse=True):
        if not left & set(file.relative_to(path).parts):
            file.rmdir() if file.is_dir() else file.unlink()
    page = written(path)
    assert "<h1>r " in page
    assert page.count("<figure") == 6


def test_a_run_that_is_running_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=3),), status="running")
    for file in (path / "metrics.jsonl", *(path / "times").iterdir()):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    page = written(path)
    assert "the last line is" in page
    assert re.search(r"<b>\d+ / 200</b><span>steps", page)


def test_runs_are_laid_side_by_side(chain: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", (Part(world_size=2, last=100),))
    (other / "config.yaml").write_text("name: other\nepochs: 4\nlr: 0.5\nseed: 1\n")
    output = tmp_path / "both.html"
    report(ReportConfig(runs=(chain, other), output=output))
    page = output.read_text()
    assert "2 runs side by side" in page
    lr = re.search(r'<tr><th scope="row">lr</th>(.*?)</tr>', page)
    assert lr is not None
    assert lr[1] == "<td>0.25</td><td>0.5</td>"
    assert '<th scope="row">epochs</th>' not in page
    assert len(list((tmp_path / "both").glob("*.png"))) == 7


def test_what_was_asked_for_comes_before_what_is_usual(chain: Path) -> None:
    page = written(chain)
    at = page.index("Configuration")
    names = re.findall(r'<tr( class=changed)?><th scope="row">(\w+)</th>', page[at:])
    kinds = [bool(changed) for changed, _ in names[:4]]
    assert kinds == sorted(kinds, reverse=True)
    assert {"name", "epochs", "lr"} <= {name for changed, name in names if changed}
    assert "seed" not in {name for changed, name in names if changed}


def test_without_matplotlib_the_error_says_what_to_type(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="-m pip install matplotlib"):
        report(ReportConfig(runs=(chain,)))


def test_a_page_is_named_as_one(chain: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a name that ends with .html"):
        report(ReportConfig(runs=(chain,), output=chain / "page"))


def test_several_runs_have_a_page_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tuple(make_run(Path(it), (Part(world_size=2),)) for it in ("a", "b"))
    report(ReportConfig(runs=runs, pictures=False))
    assert Path("report-a-b.html").exists()
    assert not list(tmp_path.glob("*/report.html"))


def test_ranks_of_jobs_of_any_size_are_told_apart(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=8, last=50), Part(world_size=12)))
    for rank in range(10):  # as they are named where there are more than ten
        file = path / "times" / f"rank-{rank:02}.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        second = max(i for i, line in enumerate(lines) if line.startswith('{"rank"'))
        if second:
            file.write_text("".join(lines[second:]))
            (path / "times" / f"rank-{rank}.jsonl").write_text("".join(lines[:second]))
    jobs = jobs_of(Run(path))
    assert [sorted(job.ranks) for job in jobs] == [list(range(8)), list(range(12))]


def test_a_page_that_cannot_be_written_is_an_error_with_its_name(chain: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        report(ReportConfig(runs=(chain,), output=chain / "no/such/folder.html"))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_and_marks_can_be_seen(scheme: int) -> None:
    of = {name: both[scheme] for name, both in COLOURS.items()}
    for text in ("ink", "muted", "good", "bad", "hang"):
        for paper in ("paper", "card"):
            assert contrast(of[text], of[paper]) >= 4.5, (text, paper)
    for name in SHARES:
        assert contrast(of[f"on-{name}"], of[name]) >= 4.5, name
    for mark in ("backward", "communication", "update", "checkpoint", "hang"):
        assert contrast(of[mark], of["paper"]) >= 3.0, mark
    for run in range(MOST_RUNS):
        assert contrast(of[f"run-{run}"], of["paper"]) >= 3.0, run


def test_the_report_of_a_day_takes_seconds_and_less_than_two_megabytes(
    tmp_path: Path,
) -> None:
    day = (
        Part(world_size=64, last=60_000, step_seconds=0.8, slow_rank=17),
        Part(world_size=64, first=59_001, last=100_000, step_seconds=0.8),
    )
    path = make_run(tmp_path / "day", day, per_line=34, steps_per_epoch=1000)
    began = time.process_time()
    report(ReportConfig(runs=(path,)))
    assert time.process_time() - began < 60  # 10 s where nobody else computes
    assert (path / "report.html").stat().st_size < 2_000_000
