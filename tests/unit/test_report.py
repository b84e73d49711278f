"""What a report shows is what the files say, whatever stands in them."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from run_folders import BEGAN, LOAD_SECONDS, START_SECONDS, Part, make_run

from mpitrain.errors import UsageError
from mpitrain.record.health import slowest_rank
from mpitrain.record.reading import Run, sums
from mpitrain.record.supervised import Restart, record_restart
from mpitrain.tools.report.analysis import (
    ALL_PHASES,
    goodput,
    jobs_of,
    restart_costs,
    seconds_by_category,
    timeline,
)
from mpitrain.tools.report.curves import bins
from mpitrain.tools.report.figures import CURVE, HANG, PHASE_COLOURS, THEME
from mpitrain.tools.report.rank_map import (
    COMMUNICATION,
    phase_shares,
    pixels,
    rank_labels,
    rank_map,
    time_labels,
)
from mpitrain.tools.report.report import ReportConfig, report
from mpitrain.tools.report.summary import findings
from mpitrain.train.metrics import FORWARD

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


def test_the_phases_of_a_rank_add_up_to_its_time(chain: Path) -> None:
    for job in jobs_of(Run(chain)):
        for part in job.ranks.values():
            wall = part.ended - (part.time - part.start_seconds)
            seconds = timeline(part)[1][-1]
            assert seconds.sum() == pytest.approx(wall, abs=1e-6)
            assert seconds[0] == pytest.approx(START_SECONDS + LOAD_SECONDS, abs=0.01)
            assert (seconds > -0.01).all()  # what rounding leaves


def test_shares_add_up_to_the_time_of_the_jobs(chain: Path) -> None:
    run = Run(chain)
    jobs = jobs_of(run)
    paces = run.metrics.throughputs
    of_each = [seconds_by_category([job], paces) for job in jobs]
    of_all = seconds_by_category(jobs, paces)
    for name, seconds in of_all.items():
        assert seconds == pytest.approx(sum(of[name] for of in of_each))
    for job, of in zip(jobs, of_each, strict=True):
        walls = [it.ended - it.time + it.start_seconds for it in job.ranks.values()]
        assert sum(of.values()) == pytest.approx(np.mean(walls), abs=1e-3)
    # Of the hang 8 s were waited by 7 of 8 ranks, and the slow one made them wait, too.
    assert of_each[0]["waiting"] > 7.0
    assert of_each[0]["communication"] < 3.0


def test_a_restart_costs_the_steps_done_again_and_the_time_without_ranks(
    tmp_path: Path,
) -> None:
    run_dir = make_run(
        tmp_path / "run",
        (Part(world_size=2, last=120), Part(world_size=2, first=101, last=400)),
    )
    first, second = jobs_of(Run(run_dir))
    error = "[rank 1/2 gpu00] died without an error message"
    fault = Restart(time=first.ended + 1.0, step=120, error=error)
    record_restart(run_dir, fault)
    record_restart(run_dir, replace(fault, time=second.ended + 9.0))  # did not resume
    run = Run(run_dir)
    (cost,) = restart_costs(run, jobs_of(run))
    assert cost.restart == fault
    assert cost.steps == 20
    assert cost.step_seconds == pytest.approx(20 * 0.1, rel=0.2)
    down = run.metrics.resumed[0].time - first.ended - 1.0
    assert down > START_SECONDS
    assert cost.down_seconds == pytest.approx(down)
    # A start that ended before it resumed costs the time until the next.
    early = replace(fault, time=fault.time - 5.0, step=0)
    run.restarts.insert(0, early)
    assert [it.steps for it in restart_costs(run, jobs_of(run))] == [0, 20]
    assert restart_costs(run, jobs_of(run))[0].down_seconds == pytest.approx(5.0)
    run.restarts.remove(early)
    jobs = jobs_of(run)
    total = jobs[-1].ended - jobs[0].began
    lost = START_SECONDS + 2.0 + down
    assert goodput(run, jobs) == pytest.approx(1 - lost / total, abs=0.02)
    report(ReportConfig(run=run_dir))
    page = (run_dir / "report.html").read_text()
    assert error in page
    assert ">goodput<" in page


def test_each_step_is_told_once_and_is_of_one_job(chain: Path) -> None:
    run = Run(chain)
    assert [it.step for it in run.metrics.steps] == list(range(1, 201))
    assert [it.epoch for it in run.metrics.epochs] == [1, 2, 3, 4]
    jobs = jobs_of(run)
    for pace in run.metrics.throughputs:
        assert sum(job.covers(pace.time) for job in jobs) == 1


def test_the_straggler_is_found_and_nobody_is_accused_without_one(
    tmp_path: Path,
) -> None:
    slow = Run(make_run(tmp_path / "slow", (Part(world_size=8, slow_rank=6),)))
    (job,) = jobs_of(slow)
    (text,) = findings([job], slow.metrics.throughputs)
    assert text.startswith("Rank 6 (gpu01) was the last in 100 % of the steps")
    # The one that costs less than a tenth of the time is none for HealthCheck either.
    by_little = Part(world_size=8, slow_rank=6, slower=0.1)
    for part in (Part(world_size=8), by_little):
        even = Run(make_run(tmp_path / f"{part.slow_rank}", (part,)))
        (text,) = findings(jobs_of(even), even.metrics.throughputs)
        assert text.startswith("No straggler")
    total = sums(even.metrics.throughputs)
    rank, num_steps, late_seconds = slowest_rank(even.metrics.throughputs)
    assert rank == 6
    assert num_steps > 0.6 * total.num_steps
    assert 0.05 < late_seconds / total.seconds < 0.1


def test_who_the_others_waited_for_at_the_end_is_named(chain: Path) -> None:
    hung, killed, finished = jobs_of(Run(chain))
    assert (hung.hanging_ranks(), hung.killed_ranks()) == ([5], [])
    assert (killed.hanging_ranks(), killed.killed_ranks()) == ([], [2])
    assert (finished.hanging_ranks(), finished.killed_ranks()) == ([], [])
    found = findings([hung, killed, finished], Run(chain).metrics.throughputs)
    assert found[1:] == [
        "Job 1: at the end rank 5 (gpu01) hung in forward for 8.0 s.",
        "Job 2: rank 2 (gpu00) left no last line: killed, or stopped.",
    ]


def test_ranks_that_were_ended_by_another_are_not_called_killed(tmp_path: Path) -> None:
    part = Part(world_size=4, ends="raise", bad_rank=1)
    (job,) = jobs_of(Run(make_run(tmp_path / "r", (part,), status="failed")))
    assert (job.killed_ranks(), job.hanging_ranks(), job.failed_ranks()) == (
        [],
        [],
        [1],
    )
    assert "At the end rank 1 (gpu00) was in forward for 8.0 s." in findings([job], [])


def test_every_cell_of_the_map_belongs_to_one_job(chain: Path) -> None:
    jobs = jobs_of(Run(chain))
    found = rank_map(jobs, 400)
    assert found.shares.shape[:2] == (8, 400)
    sums = found.shares.sum(-1)
    assert sums.max() < 1 + 1e-6
    assert (np.diff(found.edges.ravel()) > 0).all()
    for job, (left, right) in zip(jobs, found.edges, strict=True):
        inside = slice(round(left * 400) + 1, round(right * 400) - 1)
        start = slice(inside.start, inside.start + 5)
        assert np.allclose(sums[: job.world_size, start], 1)  # nobody waits there
        assert (sums[job.world_size :, inside] == 0).all()


def test_the_map_shows_the_straggler_the_hang_and_the_killed(chain: Path) -> None:
    found = rank_map(jobs_of(Run(chain)), 400)
    left, right = (round(400 * it) for it in found.edges[0])
    trained = slice(left + round(0.4 * (right - left)), left + round(0.6 * right))
    image = pixels(found)
    busy = image[..., 3].reshape(8, -1, 400)[..., trained].mean((1, 2))
    assert busy.argmax() == 5
    assert busy[5] > 0.95
    assert np.delete(busy, 5).max() < 0.8
    assert found.is_hanging[5].any()
    assert not np.delete(found.is_hanging, 5, 0).any()
    assert found.is_missing[2].any()
    assert not np.delete(found.is_missing, 2, 0).any()


def test_a_phase_has_its_share_of_the_pixels_of_a_row(chain: Path) -> None:
    found = rank_map(jobs_of(Run(chain)), 400)
    image = pixels(found).reshape(8, -1, 400, 4)
    num = image.shape[1]
    for name in ("forward", "backward"):
        colour = np.array(to_rgba(PHASE_COLOURS[name]))
        drawn = np.isclose(image[:, :, 100], colour).all(-1).sum(1) / num
        assert drawn == pytest.approx(
            found.shares[:, 100, ALL_PHASES.index(name)], abs=1.01 / num
        )


def test_what_all_ranks_spend_in_communication_is_the_same(chain: Path) -> None:
    """The rest of it is waiting for the slow rank, which waits for nobody."""
    found = rank_map(jobs_of(Run(chain)), 400)
    end = round(found.edges[0, 1] * 400) - 1
    communication = found.shares[:, :end, COMMUNICATION]  # of the first job alone
    assert communication.max() > 0.01
    assert np.allclose(communication, communication[5])


def test_no_two_colours_of_the_map_can_be_mistaken() -> None:
    for pair in itertools.combinations([*PHASE_COLOURS.values(), HANG], 2):
        one, other = (np.array(to_rgba(colour)) for colour in pair)
        assert abs(one - other).max() > 0.13, pair


def test_of_thousands_of_ranks_the_slow_one_is_still_seen(tmp_path: Path) -> None:
    part = Part(world_size=1500, last=6, slow_rank=777, slower=2.0, step_seconds=8.0)
    path = make_run(tmp_path / "r", (part,), ranks_per_node=8)
    found = rank_map(jobs_of(Run(path)), 100)
    assert found.shares.sum((1, 2)).argmax() == 777
    assert len(pixels(found)) == 1500
    places, labels = rank_labels(jobs_of(Run(path))[0])
    assert len(places) == len(labels) <= 24


def test_what_a_rank_did_between_two_times_adds_up(chain: Path) -> None:
    job = jobs_of(Run(chain))[0]
    part = job.ranks[5]
    for num in (1, 7, 1000):
        times = np.linspace(job.began, job.ended, num + 1)
        found = phase_shares(part, times) * np.diff(times)[:, None]
        assert found.sum() == pytest.approx(job.seconds, abs=1e-3)
        assert found.sum(0) == pytest.approx(timeline(part)[1][-1], abs=0.02)
    last = phase_shares(part, np.array([job.ended - 8.0, job.ended]))[0]
    assert last[1 + FORWARD] == pytest.approx(1.0, abs=1e-3)


def test_marks_of_time_lie_within_jobs(chain: Path) -> None:
    found = rank_map(jobs_of(Run(chain)), 400)
    places, labels = time_labels(found)
    assert 1 < len(places) == len(labels) <= 8
    for job, (left, right) in zip(jobs_of(Run(chain)), found.edges, strict=True):
        assert found.place(job.began) == pytest.approx(left)
        assert found.place(job.ended) == pytest.approx(right)


def test_bins_keep_ends_and_extremes() -> None:
    numbers = np.random.default_rng(1)
    for num in (0, 1, 5, 400, 100_001):
        x, y = np.arange(num, dtype=float), numbers.normal(size=num)
        xs, low, mean, high = bins(x, y, 100)
        assert len(xs) == len(mean) == min(num, 100)
        if num:
            assert xs[-1] == num - 1
            assert (low.min(), high.max()) == (y.min(), y.max())
            assert (low <= mean).all()
            assert (mean <= high).all()
            assert (np.diff(xs) > 0).all()


def test_numbers_that_are_none_are_left_out() -> None:
    x, _, y, _ = bins([1, 2, 3], [0.5, np.nan, np.inf])
    assert (x.tolist(), y.tolist()) == ([1.0], [0.5])


def written(path: Path) -> str:
    output = path / "report.html"
    report(ReportConfig(run=path, output=output, pictures=False))
    return output.read_text()


def test_the_page_asks_nobody_for_anything(chain: Path) -> None:
    page = written(chain)
    assert "<b>87.50 %</b><span>best validation accuracy</span>" in page
    loads = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert loads
    assert all(it.startswith(("#", "data:")) for it in loads)
    assert "<script" not in page
    assert re.search(
        r"""Content-Security-Policy"\s+content="default-src 'none'""", page
    )
    svgs = "".join(re.findall("<svg.*?</svg>", page, re.DOTALL))
    for light, _ in THEME.values():  # each is a variable, other on dark pages
        assert light not in svgs
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for used in re.findall(r"var\(--([a-z0-9-]+)\)", page):
        assert used in THEME


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
    found = re.findall('<figure id="([^"]+)"', page)
    ranks = ["ranks"] if "times" in left else []
    rates = ["learning-rate"] if "metrics.jsonl" in left else []
    assert found == ["loss", "accuracy", *ranks, "throughput", *rates]


def test_each_metric_has_its_curve_and_each_chart_one_title(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=1),))
    text = (path / "metrics.jsonl").read_text()
    text = text.replace('"val_accuracy"', '"val_miou": 0.25, "val_a/b <i>"')
    (path / "metrics.jsonl").write_text(text)
    result = json.loads((path / "result.json").read_text())
    result |= {"best_by": "max:miou", "val_miou": 0.25, "val_loss": 1.0}
    (path / "result.json").write_text(json.dumps(result))
    output = tmp_path / "page.html"
    report(ReportConfig(run=path, output=output))
    page = output.read_text()
    titles = ["Loss", "Validation miou", "Validation a/b &lt;i&gt;", "Ranks by time"]
    titles += ["Throughput in samples per second", "Learning rate"]
    assert re.findall("<h2>(.*?)</h2>", page) == titles
    for title in titles:
        assert len(re.findall(f">[^<]*{re.escape(title)}[^<]*<", page)) == 1
    assert "<b>0.25</b><span>best validation miou</span>" in page
    pictures = {file.name for file in (tmp_path / "page").iterdir()}
    assert {"val-miou.png", "val-a-b--i-.png", "ranks.png"} < pictures


def test_groups_stages_early_stopping_and_the_test_are_shown(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=1),))
    rows = [json.loads(it) for it in (path / "metrics.jsonl").read_text().splitlines()]
    ends = [row for row in rows if row["event"] == "epoch"]
    assert len(ends) > 1
    ends[0]["stage"], ends[-1]["stage"] = "probe", "whole <net>"
    for row in rows:
        if row["event"] == "step" and row["step"] <= ends[0]["step"]:
            row["lr_groups"] = [0.5, 0.125, None]
    rows.append({"event": "test", "test_accuracy": 0.875, "test_loss": 1.5})
    for num in (1500, 12):
        call = {"data": "<Birds>", "predicted_samples": num, "step": 7, "time": 1.0}
        rows.append({"event": "predict", **call})
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (path / "metrics.jsonl").write_text(text)
    result = json.loads((path / "result.json").read_text())
    result["early_stopping"] = "val_a<b was best at step 7, 2 validations before"
    (path / "result.json").write_text(json.dumps(result))
    run = Run(path)
    steps = [it for it in run.metrics.steps if it.step <= ends[0]["step"]]
    assert [it.lr_groups[:2] for it in steps] == [(0.5, 0.125)] * len(steps)
    output = tmp_path / "page.html"
    report(ReportConfig(run=path, output=output, pictures=False))
    page = output.read_text()
    assert "Early stopping: val_a&lt;b was best at step 7, 2 validations" in page
    assert "<b>87.50 %</b><span>test accuracy</span>" in page
    of_rates = page[page.index('<figure id="learning-rate"') :]
    assert all(f"group {i}" in of_rates for i in (0, 1, 2))
    table = page[page.index("<summary>Stages") :]
    assert table.index(">probe<") < table.index(">whole &lt;net&gt;<")
    assert "end of a stage" in page
    table = page[page.index("<summary>Predictions") :]
    cells = re.findall("<td>(.*?)</td>", table.partition("</table>")[0])
    assert '<th scope="row">&lt;Birds&gt;</th>' in table
    assert (*cells[::3], cells[2]) == ("1,500", "12", "7")


def test_a_run_that_is_running_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=3),), status="running")
    for file in (path / "metrics.jsonl", *(path / "times").iterdir()):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    page = written(path)
    assert "the last line is" in page
    assert re.search(r"<b>\d+ / 200</b><span>steps", page)


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="-m pip install matplotlib"):
        report(ReportConfig(run=chain))


def test_a_page_is_named_as_one(chain: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a name that ends with .html"):
        report(ReportConfig(run=chain, output=chain / "page"))


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
        report(ReportConfig(run=chain, output=chain / "no/such/folder.html"))


def luminance(colour: str) -> float:
    parts = np.array(to_rgba(colour)[:3])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_and_marks_can_be_seen(scheme: int) -> None:
    of = {name: both[scheme] for name, both in THEME.items()}
    for text in ("ink", "muted", "good", "bad"):
        for paper in ("paper", "card"):
            assert contrast(of[text], of[paper]) >= 4.5, (text, paper)
    marks = [PHASE_COLOURS[it] for it in ("backward", "communication", "update")]
    for mark in (*marks, HANG, CURVE):
        assert contrast(mark, of["paper"]) >= 3.0, mark


@pytest.mark.slow
def test_the_report_of_a_day_takes_seconds_and_less_than_two_megabytes(
    tmp_path: Path,
) -> None:
    day = (
        Part(world_size=64, last=60_000, step_seconds=0.8, slow_rank=17),
        Part(world_size=64, first=59_001, last=100_000, step_seconds=0.8),
    )
    path = make_run(tmp_path / "day", day, per_line=34, steps_per_epoch=1000)
    began = time.process_time()
    report(ReportConfig(run=path))
    assert time.process_time() - began < 60  # 10 s where nobody else computes
    assert (path / "report.html").stat().st_size < 2_000_000
