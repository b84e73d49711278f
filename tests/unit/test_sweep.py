"""What a sweep searches, where its trials run, and what its folder holds."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from mpitrain.cli import main, read_config
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.files import read_json
from mpitrain.mpi.world import Node, World
from mpitrain.tools.sweep import worker
from mpitrain.tools.sweep.config import SweepConfig, prepare, read_training
from mpitrain.tools.sweep.messages import Message, TrialResult
from mpitrain.tools.sweep.placement import Placement
from mpitrain.tools.sweep.server import Server
from mpitrain.tools.sweep.space import Search, read_search, trial_flags
from mpitrain.tools.sweep.study import (
    JOURNAL,
    Study,
    best_command,
    counts_of,
    finished_trials,
    load_study,
)


def world_of(*sizes: int, gpus_per_node: int = 0) -> World:
    """A job of which each node has so many ranks."""
    nodes, first = [], 0
    for number, size in enumerate(sizes):
        gpus = tuple(
            f"gpu{i % gpus_per_node}" for i in range(size if gpus_per_node else 0)
        )
        ranks = tuple(range(first, first + size))
        nodes.append(Node(hostname=f"n{number}", ranks=ranks, gpus=gpus))
        first += size
    return World(
        rank=0,
        world_size=first,
        local_rank=0,
        local_world_size=sizes[0],
        node_rank=0,
        nodes=tuple(nodes),
    )


def search_of(tmp_path: Path, text: str) -> Search:
    (tmp_path / "space.yaml").write_text(text)
    return read_search(str(tmp_path / "space.yaml"))


# --- placement --------------------------------------------------------------------


def test_a_trial_that_fits_on_a_node_is_not_spread() -> None:
    placement = Placement(world_of(4, 4))
    first = [placement.take(2), placement.take(3)]
    assert first == [[0, 1], [4, 5, 6]]
    assert placement.take(3) is None  # three ranks are free, on two nodes
    assert placement.take(1) == [7]  # where least is left
    placement.give_back([0, 1])
    assert placement.take(4) == [0, 1, 2, 3]
    assert placement.num_busy == 8


def test_a_large_trial_takes_whole_nodes() -> None:
    placement = Placement(world_of(4, 4, 4))
    assert placement.take(1) == [0]
    assert placement.take(6) == [4, 5, 6, 7, 8, 9]
    placement = Placement(world_of(2, 4))
    assert placement.take(5) == [0, 1, 2, 3, 4]


def test_two_trials_do_not_share_a_gpu_unless_asked_to() -> None:
    world = world_of(4, gpus_per_node=2)
    placement = Placement(world)
    assert placement.take(1) == [0]
    assert placement.take(3) is None  # rank 2 has the GPU of rank 0
    assert placement.take(1) == [1]
    assert placement.take(1) is None
    shared = Placement(world, share_gpus=True)
    assert [shared.take(1) for _ in range(4)] == [[0], [1], [2], [3]]


# --- the space --------------------------------------------------------------------

SPACE = """
metric: min:loss
sampler: {name: tpe, n_startup_trials: 4}
pruner: asha
trials: 7
space:
  lr: {log: [1e-4, 1]}
  momentum: {uniform: [0.5, 0.9, 0.1]}
  epochs: {int: [1, 5]}
  optimizer: [sgd, adamw]
  weight-decay: {choices: [1e-3, 0.1], if: {optimizer: adamw}}
  random_flip: [true, false]
"""


def test_a_space_in_yaml_is_sampled_by_optuna(tmp_path: Path) -> None:
    search = search_of(tmp_path, SPACE)
    assert search.metrics == [("min", "loss")]
    assert search.num_trials(None) == 7
    assert search.num_trials(3) == 3
    study = Study(tmp_path, search, 30, seed=1)
    found = [study.ask() for _ in range(30)]
    assert study.ask() is None
    seen = set()
    for trial in found:
        assert trial is not None
        values: Any = trial.flags
        config = read_config(trial_flags(values))
        assert 1e-4 <= config.lr <= 1  # type: ignore[operator]
        assert round(10 * config.momentum, 6) in range(5, 10)
        assert config.epochs in range(1, 6)
        assert ("weight_decay" in values) == (values["optimizer"] == "adamw")
        assert config.random_flip is values["random_flip"]
        seen.add(values["optimizer"])
    assert seen == {"sgd", "adamw"}


def test_a_grid_has_each_combination_once(tmp_path: Path) -> None:
    search = search_of(
        tmp_path,
        "sampler: grid\nspace:\n  optimizer: [sgd, adamw]\n"
        "  weight_decay: {choices: [0.1, 0.2], if: {optimizer: [adamw]}}\n"
        "  epochs: {int: [1, 5, 2]}\n",
    )
    expected = [dict(it) for it in search.grid()]
    assert len(expected) == search.num_trials(50) == 9
    for _ in range(2):  # the second time in another job
        study = Study(tmp_path, search, search.num_trials(None), seed=1)
    asked = [study.ask() for _ in range(9)]
    assert [dict(trial.flags) for trial in asked if trial] == expected
    assert study.ask() is None


def test_a_condition_on_a_number_with_an_exponent_holds(tmp_path: Path) -> None:
    """YAML takes 1e-4 for a word, in choices and in conditions alike."""
    search = search_of(
        tmp_path,
        "sampler: grid\nspace:\n  lr: [1e-4, 1e-3]\n"
        "  momentum: {choices: [0.5, 0.9], if: {lr: 1e-4}}\n"
        "  shift: {choices: [2], if: {lr: [1e-3, 1e-2]}}\n",
    )
    assert [dict(it) for it in search.grid()] == [
        {"lr": 1e-4, "momentum": 0.5},
        {"lr": 1e-4, "momentum": 0.9},
        {"lr": 1e-3, "shift": 2},
    ]


WANDB = """
method: bayes
metric: {name: val/accuracy, goal: maximize}
early_terminate: {type: hyperband, min_iter: 2, eta: 4}
run_cap: 9
parameters:
  lr: {distribution: log_uniform_values, min: 0.001, max: 1}
  momentum: {min: 0.5, max: 0.9}
  epochs: {min: 1, max: 5}
  optimizer: {values: [sgd, adamw]}
  seed: {value: 3}
"""


def test_a_sweep_file_of_wandb_is_read(tmp_path: Path) -> None:
    search = search_of(tmp_path, WANDB)
    assert search.metrics == [("max", "accuracy")]
    assert search.sampler == {"name": "tpe"}
    assert search.pruner == {
        "name": "hyperband",
        "min_resource": 2,
        "reduction_factor": 4,
    }
    assert search.num_trials(None) == 9
    kinds = {it.name: (it.kind, list(it.values)) for it in search.parameters}
    assert kinds == {
        "lr": ("float", [0.001, 1.0]),
        "momentum": ("float", [0.5, 0.9]),
        "epochs": ("int", [1, 5]),
        "optimizer": ("categorical", ["sgd", "adamw"]),
        "seed": ("categorical", [3]),
    }


@pytest.mark.parametrize(
    "text",
    [
        "method: random\nparameters:\n  momentum: {values: [0, 1]}\n"
        "  optimizer: {values: [sgd, adamw], probabilities: [0.9, 0.1]}\n",
        "sampler: random\nspace:\n  momentum: [0, 1]\n"
        "  optimizer: {choices: [sgd, adamw], probabilities: [0.9, 1e-1]}\n",
    ],
)
def test_random_search_draws_values_with_their_probabilities(
    tmp_path: Path, text: str
) -> None:
    study = Study(tmp_path, search_of(tmp_path, text), 200, seed=1)
    trials = [trial for trial in (study.ask() for _ in range(200)) if trial]
    counts = Counter(trial.flags["optimizer"] for trial in trials)
    assert counts["sgd"] == pytest.approx(180, abs=13)  # three standard deviations
    counts = Counter(trial.flags["momentum"] for trial in trials)
    assert counts[0] == pytest.approx(100, abs=22)
    assert study.ask() is None


@pytest.mark.parametrize("method", ["bayes", "grid"])
def test_probabilities_are_refused_by_a_method_that_does_not_draw_by_them(
    tmp_path: Path, method: str
) -> None:
    text = "parameters: {lr: {values: [1, 2], probabilities: [0.9, 0.1]}}"
    with pytest.raises(
        UsageError, match=r"lr: probabilities need random search .*, found"
    ):
        search_of(tmp_path, f"method: {method}\n{text}")


def test_flags_in_the_spelling_of_wandbs_agent_are_taken() -> None:
    config = read_config(["--random_flip=True", "--lr=0.1", "--global_batch_size=32"])
    assert (config.random_flip, config.lr, config.global_batch_size) == (True, 0.1, 32)
    assert read_config(["--random_flip=False"]).random_flip is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("space: [1]", "expected `space:` and flags below it"),
        ("spaces: {lr: [1]}", "found 'spaces'. Did you mean 'space'?"),
        ("space: {lr: {lgo: [1, 2]}}", "lr: found {'lgo': [1, 2]}; expected a list"),
        ("space: {lr: {log: [0, 2]}}", "lr: log: found [0, 2], expected [lowest, hi"),
        ("space: {lr: {uniform: [3, 2]}}", "lr: uniform: found [3, 2], expected"),
        ("space: {lr: {uniform: [0, .inf]}}", "lr: uniform: found [0, inf], expected"),
        ("space: {epochs: {int: [1.5, 3]}}", "epochs: int: found [1.5, 3], expected"),
        ("space: {epochs: {int: [1, 8, 0]}}", "epochs: int: found [1, 8, 0], expect"),
        ("space: {lr: {uniform: [0, 1, -0.1]}}", "lr: uniform: found [0, 1, -0.1]"),
        ("space: {lr: {choices: []}}", "lr: expected a list of numbers and words"),
        ("metric: accuracy\nspace: {lr: [1]}", "metric 'accuracy': expected max:NAME"),
        (
            "sampler: tep\nspace: {lr: [1]}",
            "sampler 'tep': expected one of tpe, random",
        ),
        ("sampler: grid\nspace: {lr: {uniform: [1, 2]}}", "lr: a grid needs choices"),
        (
            "space: {lr: {choices: [1], if: {a: 1}}, a: [1]}",
            "'a' does not stand before",
        ),
        ("trials: 0\nspace: {lr: [1]}", "trials: found 0, expected a number above 0"),
        ("pruner: asha\nmetric: [min:a, max:b]\nspace: {lr: [1]}", "needs one metric"),
        ("method: best\nparameters: {}", "method 'best': expected bayes, random, grid"),
        ("parameters: {lr: {min: 1}}", "lr: found {'min': 1}; expected value, values"),
        ("space: {lr: {choices: [1], if: sgd}}", "if: expected flags and values"),
        ("parameters: [1]", "parameters, metric: expected names and values"),
        ("a: [", "cannot be read"),
        *(
            (
                "sampler: random\nspace: {lr: {choices: [1, 2], probabilities: "
                f"{found}}}}}",
                f"lr: probabilities: found {found}, expected 2 numbers from 0 to 1",
            )
            for found in ([1.0], [0.5, 0.6], [-0.5, 1.5], ["a", "b"], 1, [0.9, True])
        ),
        ("space: {lr: {log: [1, 2], probabilities: [1]}}", "lr: found {'log': [1, 2]"),
        ("parameters: {lr: {values: [1], q: 2}}", "lr: found {'values': [1], 'q': 2}"),
        (
            "early_terminate: {type: hyperband, s: 2, strict: true}\n"
            "parameters: {lr: {value: 1}}",
            "early_terminate: found {'type': 'hyperband', 's': 2, 'strict': True}; exp",
        ),
        (
            "early_terminate: true\nparameters: {lr: {value: 1}}",
            "early_terminate: found True; expected type: hyperband,",
        ),
        (
            "early_terminate: {type: envelope}\nparameters: {lr: {value: 1}}",
            "early_terminate: found {'type': 'envelope'}; expected type: hyperband,",
        ),
        *(
            (
                f"early_terminate: {{type: hyperband, {found}}}\n"
                "parameters: {lr: {value: 1}}",
                "expected type: hyperband, eta, and min_iter or max_iter and s above 0",
            )
            for found in ("eta: 0, max_iter: 9", "max_iter: abc", "eta: 2.5", "s: null")
        ),
        *(
            (
                f"parameters: {{lr: {{distribution: {found}}}}}",
                "lr: found {'distribution': ",
            )
            for found in (
                "log_uniform, min: a, max: b",
                "log_uniform, min: 0, max: 1000",
                "log_uniform, min: [0], max: 1",
                "[uniform], min: 0, max: 1",
            )
        ),
        ("method: [grid]\nparameters: {}", "method ['grid']: expected bayes, random"),
    ],
)
def test_a_space_that_cannot_be_used_says_why(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(UsageError) as error:
        search_of(tmp_path, text)
    assert expected in str(error.value)
    assert str(tmp_path / "space.yaml") in str(error.value)


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (
            "space: {lrr: [1]}",
            [],
            "the space names 'lrr'; expected flags of a training",
        ),
        (
            "space: {name: [a]}",
            [],
            "the space names 'name'; expected flags of a training",
        ),
        (
            "space: {lr: [1]}",
            ["--name", "x"],
            "--name has no place in the trainings of a sweep.",
        ),
        ("space: {lr: [1]}", ["--lrr", "1"], "unknown flag --lrr"),
        ("space: {lr: [1]}", ["--time-limit", "9"], "Expected --hours before --"),
    ],
)
def test_names_and_flags_are_checked_before_the_start(
    tmp_path: Path, text: str, flags: list[str], expected: str
) -> None:
    (tmp_path / "space.yaml").write_text(text)
    config = SweepConfig(space=str(tmp_path / "space.yaml"))
    with pytest.raises(UsageError) as error:
        read_training(config, flags)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--out", "runs/a"], "no argument of train.py has {dir}"),
        (["train.py"], "Type such as: -- run train.py --out {dir}"),
        (["--no-python", "ls", "{dir}"], "expected a script, or -m and a module"),
        (["other.py", "{dir}"], "'other.py' cannot be read as a script"),
        ([], "nothing to run is named"),
        (["--devise", "cpu", "train.py", "{dir}"], "unknown flag --devise"),
    ],
)
def test_a_script_is_checked_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("space.yaml").write_text("space: {lr: [1]}")
    config = SweepConfig(space="space.yaml")
    with pytest.raises(UsageError) as error:
        read_training(config, ["run", *words])
    assert expected in str(error.value)
    read_training(config, ["run", "train.py", "--out={dir}"])


def test_a_chain_of_jobs_sweeps_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("space.yaml").write_text("space: {lr: [1]}")
    command = ["jobscript", "slurm", "--jobs", "3", "--name", "search", "--"]
    words = ["sweep", "space.yaml", "--", "run", "train.py", "--out"]
    assert main([*command, *words, "{dir}"]) == 0
    said = capsys.readouterr().out
    assert "space.yaml -- run train.py --out '{dir}' \"$@\"" in said
    assert main([*command, *words, "runs/a"]) == 2
    assert "no argument of train.py has {dir}" in capsys.readouterr().err


def test_flags_of_a_script_keep_their_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my train.py").write_text("")
    Path("space.yaml").write_text(
        "space:\n  hidden_size: [3]\n  weight-decay: [0.1]\n  use-ema: [false]\n"
        "  rate: {choices: [null, -1e-5], if: {weight-decay: 0.1}}\n  ranks: [2]\n"
    )
    config = SweepConfig(space="space.yaml", sweeps_dir=tmp_path / "sweeps")
    flags = ["run", "--device", "cpu", "my train.py", "--out", "{dir}/a"]
    made = prepare(config, flags)
    assert made.config.launch.device == "cpu"
    names = "hidden_size", "weight-decay", "use-ema", "rate", "ranks"
    assert [it.name for it in made.search.parameters] == [*names]
    fixed = optuna.trial.FixedTrial(
        {
            "hidden_size": 3,
            "weight-decay": 0.1,
            "use-ema": False,
            "rate": None,
            "ranks": 2,
        }
    )
    words = made.trial_words("trial-0007", made.search.suggest(fixed))
    assert words[2:5] == ["my train.py", "--out", str(made.run_dir / "trial-0007/a")]
    assert words[5:] == ["--hidden_size", "3", "--weight-decay", "0.1", "--no-use-ema"]
    study = Study(made.run_dir, made.search, 2, seed=1)
    trial = study.ask()
    assert trial is not None
    study.finish(trial.number, {"val_accuracy": 0.5})
    found = best_command(["sweeps/space"])
    start = "mpirun -np 2 python -m mpitrain run --device cpu 'my train.py' "
    assert found.startswith(f"{start}--out runs/space-trial-0000/a --hidden_size 3 ")


@pytest.mark.parametrize(
    ("values", "max_ranks"),
    [
        ("[1, 4, 2]", 4),
        ("{int: [1, 6, 4]}", 5),
        ("{log_int: [1, 8]}", 8),
        ("[many, 2.5]", 0),
        ("{uniform: [1, 4]}", 0),
    ],
)
def test_a_job_with_fewer_ranks_than_the_space_names_is_refused(
    values: str, max_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that does not fit would be recorded as failed for good."""
    monkeypatch.setattr(worker, "has_thread_multiple", lambda: True)
    search = search_of(tmp_path, f"space: {{ranks: {values}, lr: [0.1]}}")
    assert search.max_ranks == max_ranks
    if max_ranks:
        options = SweepConfig(space=str(tmp_path / "space.yaml"))
        sweep: Any = SimpleNamespace(options=options, search=search, has_trials=False)
        handler: Any = None
        said = f"in the space: {max_ranks}: found 3 ranks; .* mpirun -np {max_ranks} "
        with pytest.raises(UsageError, match=said):
            worker.run_sweep(world_of(1, 2), sweep, handler)


def test_a_trial_that_fits_a_larger_job_is_left_for_it(tmp_path: Path) -> None:
    """A lost node ends no chain: the next job has all nodes again."""
    search = begun_on(tmp_path, num_ranks=4)
    assert server_of(tmp_path, search, num_ranks=3).run() == 75
    assert [it.state.name for it in load_study(tmp_path).trials] == ["RUNNING"] * 2
    stopped = read_json(tmp_path / "result.json")["stopped"]
    waits = "2 trials wait for a job with 4 ranks, found 3"
    assert stopped == f"stopped: {waits}; 0/2 trials"


def test_a_job_that_is_too_small_chooses_no_trials(tmp_path: Path) -> None:
    """The next one would have to train them, chosen without results to choose by."""
    search = search_of(tmp_path, "space: {lr: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}")
    Study(tmp_path, search, 6, seed=1).note_ranks(4)
    server = server_of(tmp_path, search, num_ranks=3, trials=6, ranks_per_trial=4)
    assert server.run() == 75
    assert len(load_study(tmp_path).trials) == 1


def test_a_trial_that_fits_no_job_yet_does_not_wait_for_one(tmp_path: Path) -> None:
    """It was asked for by a job that was killed before it could record that."""
    search = begun_on(tmp_path, num_ranks=3)
    with pytest.raises(MpitrainError, match="found 4, expected 1 to 3"):
        server_of(tmp_path, search, num_ranks=3).run()
    assert [it.state.name for it in load_study(tmp_path).trials] == ["FAIL"] * 2


def test_a_trial_that_waits_for_room_is_overtaken_by_at_most_eight(
    tmp_path: Path,
) -> None:
    search = search_of(tmp_path, "space: {lr: [0.1]}")
    search = dataclasses.replace(search, function=f"{__name__}:second_on_both_ranks")
    ranks = Ranks()
    assert server_of(tmp_path, search, num_ranks=2, comm=ranks, trials=14).run() == 0
    small = [f"trial-{number:04}" for number in range(2, 14)]
    assert ranks.began == ["trial-0000", *small[:8], "trial-0001", *small[8:]]


def second_on_both_ranks(trial: Any) -> dict[str, int]:
    return {"ranks": 2 if trial.number == 1 else 1}


class Ranks:
    """Ranks that end the trial that began last, one message at a time."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._busy: dict[int, list[int]] = {}  # by start
        self._has_sent = False

    def send(self, message: Message, dest: int, tag: int) -> None:
        if message.kind == "start" and message.start_id not in self._busy:
            ranks, name, _ = message.data
            self.began.append(name)
            self._busy[message.start_id] = list(ranks)

    def Iprobe(self, tag: int) -> bool:
        self._has_sent = not self._has_sent and bool(self._busy)
        return self._has_sent

    def recv(self, tag: int) -> Message:
        start = max(self._busy)
        rank = self._busy[start].pop()
        if not self._busy[start]:
            del self._busy[start]
        return Message("ended", start, TrialResult("pruned", rank))


def begun_on(path: Path, num_ranks: int) -> Search:
    """Let a job of so many ranks begin one of two trials, which wants four."""
    search = search_of(path, "space: {lr: [0.1]}")
    search = dataclasses.replace(search, function=f"{__name__}:on_four_ranks")
    study = Study(path, search, 2, seed=1)
    assert study.note_ranks(num_ranks) == num_ranks
    assert study.ask() is not None
    return search


def server_of(
    path: Path, search: Search, num_ranks: int, *, comm: Any = None, **options: Any
) -> Server:
    sweep: Any = SimpleNamespace(
        options=SweepConfig(**{"space": "space.yaml", "trials": 2} | options),
        search=search,
        run_dir=path,
        config=SimpleNamespace(seed=1),
        trial_words=lambda name, flags: [name, *flags],
    )
    handler: Any = SimpleNamespace(requested=lambda: 0, seconds_left=lambda: None)
    return Server(comm, world_of(num_ranks), sweep, handler, io.StringIO())


def on_four_ranks(_: object) -> dict[str, int]:
    return {"ranks": 4}


def test_a_function_may_not_set_what_the_sweep_sets() -> None:
    search = read_search("textwrap:dedent")
    search = dataclasses.replace(search, function=f"{__name__}:wrong_space")
    with pytest.raises(UsageError, match="the space names 'dry_run'; expected flags"):
        search.suggest(None)


def wrong_space(_: object) -> dict[str, bool]:
    return {"dry_run": True}


# --- the study --------------------------------------------------------------------


def study_of(tmp_path: Path, num_trials: int = 5) -> Study:
    search = search_of(tmp_path, "metric: min:loss\nspace: {lr: {log: [0.1, 1]}}\n")
    return Study(tmp_path, search, num_trials, seed=1)


def test_a_study_goes_on_in_another_job_with_other_numbers(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    first, second = study.ask(), study.ask()
    assert first is not None
    assert second is not None
    study.set_starts(first.number, 1)
    study.finish(second.number, {"val_loss": 0.5})
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"op_code": 5, "worker')  # killed just then
    (tmp_path / f"{JOURNAL}.lock").symlink_to(tmp_path / JOURNAL)
    study = study_of(tmp_path)
    (begun,) = study.unfinished()
    assert (begun.number, begun.flags, begun.num_starts) == (0, first.flags, 1)
    third = study.ask()
    assert third is not None
    assert third.number == 2
    assert third.flags not in (first.flags, second.flags)
    assert counts_of(study.optuna) == {"finished": 1, "pruned": 0, "failed": 0}
    study.fail(0, "because")
    (best,) = finished_trials(study.optuna)
    assert best.number == 1


@pytest.mark.parametrize("result", [{}, {"val_loss": None}, {"val_accuracy": 1.0}])
def test_a_result_without_the_metric_is_an_error(
    tmp_path: Path, result: Mapping[str, Any]
) -> None:
    study = study_of(tmp_path)
    trial = study.ask()
    assert trial is not None
    with pytest.raises(MpitrainError, match="the metric 'loss' is None; expected"):
        study.finish(trial.number, result)


@pytest.mark.parametrize("name", ["tpe", "random", "cmaes", "gp", "nsgaii"])
def test_each_sampler_of_optuna_samples(tmp_path: Path, name: str) -> None:
    search = search_of(tmp_path, f"sampler: {name}\nspace: {{lr: {{log: [0.1, 1]}}}}\n")
    study = Study(tmp_path, search, 12, seed=1)
    for value in range(12):
        trial = study.ask()
        assert trial is not None
        study.finish(trial.number, {"val_accuracy": value / 12})
    assert counts_of(study.optuna)["finished"] == 12


@pytest.mark.parametrize("name", ["asha", "hyperband", "median"])
def test_each_pruner_of_optuna_prunes(tmp_path: Path, name: str) -> None:
    text = f"pruner: {name}\nspace: {{lr: {{log: [0.1, 1]}}}}\n"
    study = Study(tmp_path, search_of(tmp_path, text), 20, seed=1)
    pruned = 0
    for number in range(20):
        trial = study.ask()
        assert trial is not None
        for epoch in range(1, 10):
            if study.should_prune(trial.number, epoch, 1.0 / (number + 1)):
                study.prune(trial.number)
                pruned += 1
                break
        else:
            study.finish(trial.number, {"val_accuracy": 1.0 / (number + 1)})
    assert pruned > 0


def test_several_metrics_are_optimized_and_the_loader_reads_them(
    tmp_path: Path,
) -> None:
    text = "metric: [max:accuracy, min:loss]\nspace: {lr: {log: [0.1, 1]}}\n"
    study = Study(tmp_path, search_of(tmp_path, text), 3, seed=1)
    for number in range(3):
        trial = study.ask()
        assert trial is not None
        result = {"val_accuracy": number / 3, "val_loss": number}
        study.finish(trial.number, result)
    loaded = load_study(tmp_path)
    assert loaded.metric_names == ["accuracy", "loss"]
    assert [it.name for it in loaded.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert len(loaded.best_trials) == 3


# --- the folder and the command ---------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> SweepConfig:
    (tmp_path / "lr.yaml").write_text("space: {lr: [0.1, 0.2]}\n")
    return SweepConfig(space=str(tmp_path / "lr.yaml"), sweeps_dir=tmp_path / "sweeps")


def test_a_sweep_goes_on_with_the_same_search_alone(
    config: SweepConfig, tmp_path: Path
) -> None:
    made = prepare(config, ["--epochs", "2"])
    assert made.run_dir == tmp_path / "sweeps" / "lr"
    prepare(dataclasses.replace(config, trials=3), ["--epochs", "2"])
    with pytest.raises(UsageError, match="begun with other settings: flags: "):
        prepare(config, ["--epochs", "3"])
    (tmp_path / "lr.yaml").write_text("space: {lr: [0.1, 0.3]}\n")
    with pytest.raises(UsageError, match="begun with other settings: space: "):
        prepare(config, ["--epochs", "2"])


def test_the_best_trial_is_a_command(config: SweepConfig, tmp_path: Path) -> None:
    made = prepare(config, ["--epochs", "2"])
    study = Study(made.run_dir, made.search, 2, seed=1)
    with pytest.raises(UsageError, match="no trial is finished yet"):
        best_command([str(made.run_dir)])
    trial = study.ask()
    assert trial is not None
    study.finish(trial.number, {"val_accuracy": 0.5})
    found = best_command([str(made.run_dir)])
    flags = " ".join(trial_flags(trial.flags))
    assert found == f"mpirun -np 1 python -m mpitrain --epochs 2 {flags}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trials", "0"], "--trials must be at least 1, found 0"),
        (["--hours", "-1"], "--hours must be above 0, found -1.0"),
        (["--name", "a b"], "--name 'a b' cannot be the name"),
        (["--best"], "unknown flag --best"),
    ],
)
def test_wrong_flags_of_a_sweep_are_refused(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "space.yaml", *words]) == 2
    assert expected in capsys.readouterr().err


def test_what_optuna_gets_is_what_a_training_gets() -> None:
    """A float becomes a flag, and the flag the same float."""
    trial = optuna.trial.FixedTrial({"lr": 0.1 + 0.2})
    lr = trial.suggest_float("lr", 0, 1)
    config = read_config(trial_flags({"lr": lr, "clip_grad_norm": None}))
    assert config.lr == lr
    assert config.clip_grad_norm is None
