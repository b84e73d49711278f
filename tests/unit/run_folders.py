"""Run folders as trainings leave them, made up: of any size, with any fault."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mpitrain.record.rank_times import PHASES

BEGAN = 1_795_000_000.0
START_SECONDS = 12.0
LOAD_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """One job of a run."""

    world_size: int
    first: int = 1
    """Its first step."""
    last: int = 200
    step_seconds: float = 0.1
    slow_rank: int = -1
    slower: float = 0.5
    """How much longer that rank takes."""
    ends: Literal["well", "hang", "stopped", "raise", "unknown"] = "well"
    bad_rank: int = 0
    """For whom the others wait at the end; ``stopped``: it leaves no word."""
    pause_seconds: float = 60.0
    """Before it began."""


def make_run(
    folder: Path,
    parts: tuple[Part, ...],
    *,
    per_line: int = 1,
    hostname: str = "gpu{:02}",
    ranks_per_node: int = 4,
    status: str = "finished",
    error: str = "",
    steps_per_epoch: int = 50,
) -> Path:
    """Write a run folder; the steps in `metrics.jsonl` are those of the last jobs."""
    numbers = np.random.default_rng(7)
    (folder / "times").mkdir(parents=True)
    (folder / "run.json").write_text(
        '{"id": "x", "begun": "2026-11-22T10:00:00+00:00"}'
    )
    (folder / "config.yaml").write_text("name: made\nepochs: 4\nlr: 0.25\nseed: 1\n")
    metrics: list[tuple[int, str]] = []
    now = BEGAN
    lines: dict[int, list[str]] = {}
    for number, part in enumerate(parts):
        now += part.pause_seconds + START_SECONDS
        header_time = now
        metrics = [(step, line) for step, line in metrics if step < part.first]
        began = {
            "event": "begin", "time": now, "world_size": part.world_size,
            "num_nodes": -(-part.world_size // ranks_per_node), "num_epochs": 4,
            "start_seconds": START_SECONDS, "total_steps": parts[-1].last,
            "steps_per_epoch": steps_per_epoch, "global_batch_size": 64,
        }  # fmt: skip
        metrics.append((part.first - 1, json.dumps(began)))
        if number:
            resume = {
                "event": "resume", "time": now, "step": part.first - 1, "epoch": 1,
                "world_size": part.world_size, "checkpoint": "step-1",
            }  # fmt: skip
            metrics.append((part.first - 1, json.dumps(resume)))
        num = part.last - part.first + 1
        work = part.step_seconds * numbers.uniform(0.7, 0.8, (num, part.world_size))
        if part.slow_rank >= 0:
            work[:, part.slow_rank] *= 1 + part.slower
        whole = work.max(1) + 0.1 * part.step_seconds
        first_end = now + LOAD_SECONDS
        ends = first_end + np.cumsum(whole)
        for rank in range(part.world_size):
            header = {
                "rank": rank, "world_size": part.world_size, "time": header_time,
                "node_rank": rank // ranks_per_node, "start_seconds": START_SECONDS,
                "hostname": hostname.format(rank // ranks_per_node), "phases": PHASES,
            }  # fmt: skip
            mine = lines.setdefault(rank, [])
            mine.append(json.dumps(header))
            shares = {"data": 0.1, "forward": 0.3, "backward": 0.6}
            for at in range(0, num, per_line):
                here = slice(at, min(at + per_line, num))
                busy, all_of_it = work[here, rank].sum(), whole[here].sum()
                seconds = {name: busy * share for name, share in shares.items()}
                seconds["communication"] = all_of_it - busy - 0.02 * part.step_seconds
                seconds["update"] = 0.02 * part.step_seconds
                row = [
                    round(float(ends[here.stop - 1]), 4), part.first + here.stop - 1,
                    here.stop - at, round(float(whole[here].max()), 6),
                    *(round(float(seconds.get(name, 0.0)), 6) for name in PHASES),
                ]  # fmt: skip
                mine.append(json.dumps(row))
        now = float(ends[-1])
        if part.ends != "well":
            now += 8.0
        for rank in range(part.world_size):
            is_bad = rank == part.bad_rank
            cut = {
                "end": round(now, 3),
                "phase": "forward" if is_bad else "communication",
            }
            says = {"hang": True, "stopped": not is_bad, "raise": is_bad}
            if says.get(part.ends, False):
                lines[rank].append(json.dumps({**cut, "seconds": 8.0}))
        for index in range(num):
            step = part.first + index
            metrics.append((step, _step(step, steps_per_epoch, numbers)))
            if (index + 1) % 10 == 0 or index + 1 == num:
                last = slice(index - index % 10, index + 1)
                metrics.append(
                    (step, _pace(step, work[last], whole[last], ends[index]))
                )
            if step % steps_per_epoch == 0:
                metrics += [
                    (step, it) for it in _epoch(step, steps_per_epoch, ends[index])
                ]
    width = len(str(max(part.world_size for part in parts) - 1))
    for rank, mine in lines.items():
        (folder / f"times/rank-{rank:0{width}}.jsonl").write_text(
            "\n".join(mine) + "\n"
        )
    (folder / "metrics.jsonl").write_text("\n".join(it for _, it in metrics) + "\n")
    last_part = parts[-1]
    nodes = -(-last_part.world_size // ranks_per_node)
    result = {"status": status, "world_size": last_part.world_size, "num_nodes": nodes}
    if error:
        result["error"] = error
    (folder / "result.json").write_text(json.dumps(result))
    hosts = [
        {
            "hostname": hostname.format(node), "num_cores": 8, "gpus": [],
            "ranks": list(range(node * ranks_per_node, (node + 1) * ranks_per_node)),
            "devices": ["cpu"] * ranks_per_node,
        }
        for node in range(nodes)
    ]  # fmt: skip
    environment = {"hosts": hosts, "versions": {"torch": "2.15"}, "git_commit": None}
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def _step(step: int, steps_per_epoch: int, numbers: np.random.Generator) -> str:
    loss = 0.2 + 2.1 * math.exp(-step / (3 * steps_per_epoch))
    row = {
        "event": "step", "epoch": 1 + (step - 1) // steps_per_epoch, "step": step,
        "train_loss": loss * float(numbers.uniform(0.85, 1.15)), "lr": 0.1,
        "gradient_norm": 1.0,
    }  # fmt: skip
    return json.dumps(row)


def _pace(step: int, work: np.ndarray, whole: np.ndarray, end: float) -> str:
    last = np.bincount(work.argmax(1), minlength=work.shape[1])
    slowest = int(last.argmax())
    late = work[:, slowest] - np.median(work, 1)
    row = {
        "event": "throughput", "time": round(float(end), 3), "epoch": 1, "step": step,
        "num_steps": len(work), "num_samples": 64 * len(work),
        "seconds": float(whole.sum()), "data_seconds": 0.1 * float(work.mean(1).sum()),
        "compute_seconds": 0.9 * float(work.mean(1).sum()),
        "communication_seconds": float((whole - work.max(1)).sum()),
        "wait_seconds": float((work.max(1) - work.mean(1)).sum()),
        "slowest_rank": slowest if work.shape[1] > 1 else -1,
        "slowest_steps": int(last[slowest]), "late_seconds": float(late.sum()),
        "gpu_bytes": None,
    }  # fmt: skip
    return json.dumps(row)


def _epoch(step: int, steps_per_epoch: int, end: float) -> list[str]:
    epoch = step // steps_per_epoch
    row = {
        "event": "epoch", "time": round(float(end), 3), "stage": "train",
        "epoch": epoch, "step": step, "train_loss": 0.5, "val_loss": 0.3 + 1 / epoch,
        "val_accuracy": 1 - 0.5 / epoch, "epoch_seconds": 5.0, "train_samples": 3200,
        "val_samples": 400, "skipped_samples": 0, "skipped_steps": 0,
        "samples_per_second": 640.0,
    }  # fmt: skip
    saved = {
        "event": "checkpoint", "time": round(float(end) + 0.2, 3), "step": step,
        "copy_seconds": 0.01, "write_seconds": 0.2,
    }  # fmt: skip
    return [json.dumps(row), json.dumps(saved)]
