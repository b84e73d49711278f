"""`bench scaling`: what is timed, what is expected, how it is told; without MPI."""

from __future__ import annotations

import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitrain.cli import main
from mpitrain.errors import UsageError
from mpitrain.launch.parts import in_node_order, part_of
from mpitrain.tools.bench import figures, plot, scaling
from mpitrain.tools.bench.cells import Cell, cells_of, sizes_of
from mpitrain.tools.bench.config import BenchScalingConfig
from mpitrain.tools.bench.prediction import (
    Compute,
    Weights,
    crowding,
    line_through,
    predicted_seconds,
)
from mpitrain.tools.bench.trial import Trial
from mpitrain.world import Node, World

WEIGHTS = Weights(num_bytes=8_000_000, block_bytes=0)


def world_of(*nodes: tuple[int, ...], num_cores: int = 2) -> World:
    """Rank zero's, on nodes with these ranks."""
    return World(
        rank=0,
        world_size=sum(map(len, nodes)),
        local_rank=0,
        local_world_size=len(nodes[0]),
        node_rank=0,
        nodes=tuple(
            Node(hostname=f"n{at}", ranks=ranks, num_cores=num_cores)
            for at, ranks in enumerate(nodes)
        ),
    )


ONE_NODE = world_of(tuple(range(8)))


def told(out: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in out.splitlines()
        if line.startswith("|")
    ]


def measured_by(seconds: Any, config: BenchScalingConfig, world: World) -> Any:
    """As if steps took what a function of the cell and the round says."""
    cells, _ = cells_of(config, world, 0)
    return figures.Measured(
        trials={
            cell: [
                Trial(
                    step_seconds=seconds(cell, at),
                    all_reduce_seconds=0.1 * seconds(cell, at),
                    wait_seconds=0.2 * seconds(cell, at),
                    losses=(2.0, 1.0),
                )
                for at in range(config.rounds)
            ]
            for cell in cells
        },
        all_reduces={cell.num_ranks: [0.008, 0.01, 0.009] for cell in cells},
    )


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ([(0,)], (1,)),
        ([tuple(range(8))], (1, 2, 4, 8)),
        ([tuple(range(6))], (1, 2, 4, 6)),
        ([(0, 1, 2), (3, 4, 5)], (1, 2, 3, 4, 6)),
        ([(0,), (1,), (2,)], (1, 2, 3)),
    ],
)
def test_sizes_are_powers_of_two_whole_nodes_and_all(
    nodes: list[tuple[int, ...]], sizes: tuple[int, ...]
) -> None:
    assert sizes_of(world_of(*nodes)) == sizes


def test_nodes_are_filled_one_after_another_however_ranks_are_numbered() -> None:
    by_node = world_of((0, 2, 4), (1, 3, 5))
    assert in_node_order(by_node) == [0, 2, 4, 1, 3, 5]
    rows, _ = cells_of(BenchScalingConfig(), by_node, 0)
    nodes = {row.num_ranks: row.num_nodes for row in rows}
    assert nodes == {1: 1, 2: 1, 3: 1, 4: 2, 6: 2}
    here = replace(by_node, rank=3, local_rank=1, node_rank=1)
    assert cells_of(BenchScalingConfig(), here, 0)[0] == rows  # on every rank
    part = part_of(here, in_node_order(by_node)[:5])
    assert (part.rank, part.world_size, part.node_rank) == (4, 5, 1)
    assert (part.local_rank, part.local_world_size) == (1, 2)
    assert [node.ranks for node in part.nodes] == [(0, 1, 2), (3, 4)]


def test_a_part_keeps_each_ranks_device_and_gpu() -> None:
    world = replace(
        world_of((0, 2), (1, 3)),
        nodes=(
            Node(
                hostname="a",
                ranks=(0, 2),
                devices=("cuda:0", "cuda:1"),
                gpus=("x", "y"),
            ),
            Node(
                hostname="b",
                ranks=(1, 3),
                devices=("cuda:0", "cuda:1"),
                gpus=("z", "u"),
            ),
        ),
        device="cuda:0",
    )
    part = part_of(world, [0, 2, 1])
    assert [node.gpus for node in part.nodes] == [("x", "y"), ("z",)]
    assert [node.devices for node in part.nodes] == [("cuda:0", "cuda:1"), ("cuda:0",)]
    assert part.device == "cuda:0"


def test_each_size_has_its_strategies_and_both_kinds_of_work() -> None:
    cells, left_out = cells_of(BenchScalingConfig(), ONE_NODE, 0)
    assert [(it.num_ranks, it.strategy) for it in cells if it.fixed == "work"] == [
        (1, "single"),
        *((num, name) for num in (2, 4, 8) for name in ("ddp", "fsdp")),
    ]
    of_eight = {it.fixed: it.global_batch_size for it in cells if it.num_ranks == 8}
    assert of_eight == {"problem": 256, "work": 512}
    assert left_out == ["dp: rank 0 sees no GPU"]


def test_what_cannot_be_had_is_left_out_with_a_word() -> None:
    config = BenchScalingConfig(ranks=(2, 16), global_batch_size=1)
    cells, left_out = cells_of(config, ONE_NODE, 1)
    assert {(it.fixed, it.num_ranks) for it in cells} == {
        ("problem", 1),
        ("work", 1),
        ("work", 2),
    }
    assert left_out == [
        "16 ranks: mpirun started 8",
        "dp: rank 0 sees 1 GPU",
        "2 ranks with --global-batch-size 1: some would have no sample",
    ]
    alone = cells_of(BenchScalingConfig(), world_of((0,)), 0)
    assert {it.strategy for it in alone[0]} == {"single"}
    assert "ddp: there is one rank" in alone[1]
    several = cells_of(BenchScalingConfig(), ONE_NODE, 4)
    (dp, _) = [it for it in several[0] if it.strategy == "dp"]
    assert (dp.num_ranks, dp.num_devices, dp.samples_per_device) == (1, 4, 64)


def test_a_step_is_predicted_from_one_ranks_and_the_bandwidth() -> None:
    compute = line_through([(64, 0.02), (256, 0.068)])
    assert compute == Compute(step_seconds=0.004, sample_seconds=0.00025)
    two = part_of(ONE_NODE, range(2))
    found = predicted_seconds(compute, 128, two, WEIGHTS.traffic("ddp", 2), 1e9)
    assert found == pytest.approx(0.004 + 128 * 0.00025 + 0.008)
    # 8 ranks of one thread share 2 cores.
    found = predicted_seconds(compute, 32, ONE_NODE, 0.0, 1e9)
    assert found == pytest.approx(4 * (0.004 + 32 * 0.00025))


@pytest.mark.parametrize(
    "points", [[(64, 0.1), (256, 0.1)], [(64, 0.02), (256, 0.2)], [(256, 0.2)]]
)
def test_a_line_never_begins_below_nothing(points: list[tuple[int, float]]) -> None:
    compute = line_through(points)
    assert compute.step_seconds == 0.0
    assert compute.seconds(256) == pytest.approx(points[-1][1])


def test_ranks_crowd_where_they_share_a_gpu() -> None:
    node = Node(hostname="a", ranks=(0, 1, 2), gpus=("x", "y", "x"), num_cores=64)
    world = replace(world_of((0, 1, 2)), nodes=(node,), device="cuda:0")
    assert crowding(world) == 2.0
    assert crowding(part_of(world, [0, 1])) == 1.0


def test_sixteen_bits_halve_what_fsdp_gathers() -> None:
    weights = Weights(num_bytes=80, block_bytes=40, gathered_share=0.5)
    assert weights.traffic("fsdp", 2) == (80 + 0.5 * 120) / 2
    assert weights.traffic("ddp", 2) == 80


def test_speed_ups_are_of_rounds_side_by_side() -> None:
    """The machine is ten times as slow in one round: that changes no ratio."""
    config = BenchScalingConfig(rounds=3, strategies=("single", "ddp"))

    def seconds(cell: Cell, at: int) -> float:
        return (10 if at == 1 else 1) * cell.global_batch_size / cell.num_ranks / 1000

    rows = figures.rows_of(
        measured_by(seconds, config, ONE_NODE), ONE_NODE, WEIGHTS, config.strategies
    )
    assert [row["num_ranks"] for row in rows] == [1, 2, 4, 8] * 2
    for row in rows:
        assert row["speed_up"] == pytest.approx(row["num_ranks"])
        assert row["speed_up_range"] == pytest.approx([row["num_ranks"]] * 2)
        assert row["efficiency"] == pytest.approx(1.0)
        assert max(row["seconds"]) == pytest.approx(10 * row["step_seconds"])
    assert rows[0]["predicted_seconds"] is None
    assert rows[0]["all_reduce_share"] is None
    of_two = rows[1]
    assert of_two["all_reduce_share"] == pytest.approx(0.1)
    assert of_two["wait_share"] == pytest.approx(0.2)
    # 256 samples of 1 ms by two ranks, and 8 MB at 8 MB / 9 ms.
    assert of_two["predicted_seconds"] == pytest.approx(0.128 + 0.009)


def some_rows(world: World = ONE_NODE) -> list[dict[str, Any]]:
    config = BenchScalingConfig(rounds=3)

    def seconds(cell: Cell, at: int) -> float:
        slower = 1.3 if cell.strategy == "fsdp" else 1.0
        return slower * cell.global_batch_size / cell.num_ranks**0.8 / (1000 + 50 * at)

    found = measured_by(seconds, config, world)
    return figures.rows_of(found, world, WEIGHTS, config.strategies)


def test_the_table_tells_what_the_rows_hold() -> None:
    rows = some_rows()
    text = figures.tables(rows, ["dp: rank 0 sees no GPU"])
    assert text.startswith("Fixed problem, 256 samples per step:\n\n| strategy | nodes")
    assert "\nFixed work, 64 samples per step on each rank:\n" in text
    assert text.endswith("\nLeft out: dp: rank 0 sees no GPU.\n")
    lines = [
        line
        for line in told(text)
        if line[0] not in ("strategy",) and ":" not in line[0]
    ]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        cells = dict(zip(figures.HEAD, line, strict=True))
        assert cells["strategy"] == row["strategy"]
        assert cells["ranks"] == str(row["num_ranks"])
        assert cells["ms/step"] == f"{1e3 * row['step_seconds']:.1f}"
        assert cells["speed-up"] == f"{row['speed_up']:.2f}"
        low, high = map(float, cells["min to max"].split(" to "))
        assert low <= float(cells["ms/step"]) <= high
        is_single = row["strategy"] == "single"
        assert (cells["predicted"] == "-") == is_single
        assert (cells["all-reduce"] == "-") == (row["strategy"] != "ddp")


def pixels_of(file: Path) -> tuple[int, int, int]:
    """Width, height, and how many of its lines' bytes a PNG is not white in."""
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += length + 12
    return width, height, len(set(zlib.decompress(packed)))


@pytest.mark.parametrize("world", [world_of((0,)), ONE_NODE, world_of((0, 1), (2, 3))])
def test_the_plot_is_a_picture_with_something_on_it(
    world: World, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    rows = some_rows(world)
    plot.draw(rows, "convnet", tmp_path / "scaling.png")
    width, height, num_values = pixels_of(tmp_path / "scaling.png")
    assert width > 1.5 * height > 900
    assert num_values > 50
    plot.draw(
        [row for row in rows if row["fixed"] == "work"], "m", tmp_path / "one.png"
    )
    assert pixels_of(tmp_path / "one.png")[0] < width
    assert sorted(it.name for it in tmp_path.iterdir()) == ["one.png", "scaling.png"]


def test_without_matplotlib_all_but_the_plot_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = some_rows()
    scaling._write(tmp_path, {"config": {"model": "convnet"}}, "a table\n", rows)
    said = capsys.readouterr()
    assert "-m pip install matplotlib)" in said.err
    assert said.out == f"table.md, scaling.json in {tmp_path}\n"
    assert sorted(it.name for it in tmp_path.iterdir()) == ["scaling.json", "table.md"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--global-batch-size", "0", "--rank-batch-size", "0"], "nothing to time"),
        (["--strategies", "best"], "--strategies"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scaling", *words]) == 2
    assert part in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--output .* cannot be made: "):
        scaling._folder(BenchScalingConfig(output=tmp_path / "file" / "folder"))


def test_help_names_both_and_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "bench scaling" in capsys.readouterr().out
    assert main(["bench", "scaling", "--help"]) == 0
    assert "--rank-batch-size" in capsys.readouterr().out
