"""The command line and the YAML file are one class, and mistakes are named."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from mpitrain.cli import COMMANDS, main, read_config, start_timeout, words_for_start
from mpitrain.config import TrainConfig
from mpitrain.errors import UsageError
from mpitrain.flags import HelpShown, read_flags
from mpitrain.help import help_text
from mpitrain.settings import Flag, facts_of, flags_of

PAGE = Path(__file__).parents[1] / "flags_page.py"
KINDS = runpy.run_path(str(PAGE))["COMMANDS"]  # the configurations of all commands


def test_without_flags_the_configuration_is_the_default() -> None:
    assert read_config([]) == TrainConfig()


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1e-3\nepochs: 3\ndry_run: true\ndata_dir: null\n")
    config = read_config(["--epochs", "5", "--config", str(file)])
    assert config == TrainConfig(lr=1e-3, epochs=5, dry_run=True)


def test_what_a_run_records_is_read_back(tmp_path: Path) -> None:
    config = TrainConfig(name="x", micro_batch_size=4, optimizer="adamw", dry_run=True)
    file = tmp_path / "config.yaml"
    file.write_text(config.as_yaml("x"))
    assert read_config(["--config", str(file)]) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: fast", "--lr: found 'fast', expected a number."),
        ("epohs: 3", "--epohs"),
        ("- 3", "expected lines like `lr: 0.1`, found list"),
        ("lr: [1, 2]", "lr is a list; expected a number"),
        ("lr: [", "cannot be read"),
        ("log: 2024-01-01", "--log '2024-01-01' is not known"),
        ("tf32: maybe", "unexpected 'maybe' after '--tf32'"),
        ("log: {csv: 1}", "log is a dict; expected a number"),
        ("epochs: 0", "--epochs must be at least 1, found 0"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(
    text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_config(["--config", str(file)])
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("name: 2026_11_30", {"name": "2026_11_30"}),  # to YAML the number 20261130
        ("name: 2026-11-30", {"name": "2026-11-30"}),  # a date
        ("name: off", {"name": "off"}),
        ("name: 'null'", {"name": "null"}),
        ("epochs: 010", {"epochs": 10}),  # octal
        ("time_limit: 1:30:00", {"time_limit": "1:30:00"}),
        ("balance: off\nbitwise: on", {"balance": "off", "bitwise": True}),
        ("tf32: True\nrandom-flip: no", {"tf32": True}),
        ("data_dir: null\nweights: ~\nname:", {}),
        ("lr: 1e-3\nmomentum: .5", {"lr": 1e-3, "momentum": 0.5}),
        ("wandb_tags: [007, on]", {"wandb_tags": ("007", "on")}),
    ],
)
def test_values_of_a_file_are_words(
    text: str, values: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert read_config(["--config", str(file)]) == TrainConfig(**values)


def test_timeouts_of_a_file_hold_for_the_start_of_mpi(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("start_timeout: 40\n")
    second.write_text("start-timeout: 50\n")
    words = ["--config", str(first)]
    assert start_timeout(words) == 40
    assert start_timeout([*words, f"--config={second}", "--lr=1"]) == 50
    assert start_timeout(["--start-timeout", "30", *words]) == 30
    second.write_text("hang_timeout: 300\nstart_timeout: null\n")
    assert start_timeout(["--config", str(second)]) == 300
    assert start_timeout(["--config", str(tmp_path / "none.yaml")]) == 600
    spaced = tmp_path / "of mine.yaml"
    spaced.write_text("start_timeout: 70\nname: a --start-timeout 9\n")
    assert start_timeout(["--config", str(spaced)]) == 70
    assert start_timeout([f"--config={spaced}"]) == 70
    assert start_timeout(["--name", f"x --config {first}"]) == 600
    spaced.write_text("[" * 5000)
    assert start_timeout(["--config", str(spaced), "--hang_timeout", "300"]) == 300


def test_of_what_is_staged_flags_of_mpitrain_alone_are_timeouts() -> None:
    flags = ["--start-timeout", "30"]
    ours = ["python", "-u", "-m", "mpitrain"]
    assert words_for_start([*ours, *flags]) == flags
    assert words_for_start([*ours, "run", *flags, "train.py", "--lr", "1"]) == flags
    assert words_for_start(["python", "train.py", *flags]) == []
    assert words_for_start(["python", "-m", "my.module", *flags]) == []
    assert words_for_start([]) == []


def test_an_output_that_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "jobscript pbs --account A --nodes 1 --slots-per-node 2 --time 1:00:00"
    assert main([*text.split(), "--output", "x" * 300]) == 2
    assert "xxx cannot be written: File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--precision bf61", "--precision: found 'bf61', expected fp32, fp64, bf16 or"),
        ("--schedule=cosin", "or constant. Did you mean 'cosine'?"),
        ("--optimizer adamm", "or adadelta. Did you mean 'adam'?"),
        ("--lr 0.1 0.2", "unexpected '0.2' after '--lr 0.1'."),
        ("--no-random-flip 1", "unexpected '1' after '--no-random-flip'."),
        ("--lr=abc", "--lr: found 'abc', expected a number."),
        ("--epochs 1.5", "--epochs: found '1.5', expected a whole number."),
        ("--num_workers atuo", "a whole number or auto. Did you mean 'auto'?"),
        ("--lr", "--lr: found no value, expected one."),
        ("--config", "--config: found no value, expected a YAML file."),
        ("--log csv foo", "--log 'foo' is not known; expected csv, tensorboard"),
        ("--epohs 3", "unknown flag --epohs. Did you mean '--epochs'?"),
        ("--no-epochs 3", "unknown flag --no-epochs. Did you mean '--epochs'?"),
        ("--lr=", "--lr: found '', expected a number."),
        ("--lr -1e-3", "--lr must be at least 0, found -0.001"),
        ("--name ../x", "--name '../x' cannot be the name of a folder"),
        ("--tf32=1", "--tf32: found '1', expected true or false."),
        ("--tf32=", "--tf32: found '', expected true or false."),
        ("--lr 0.1 foo bar", "unexpected 'foo' after '--lr 0.1'."),
        ("-c print(1)", "unexpected '-c': options of Python stand before"),
        ("--nnodes 2", "unknown flag --nnodes: mpirun"),
        ("train.py --lr 1", "Type: python -m mpitrain run train.py --lr 1"),
        ("./my/train.py", "Type: python -m mpitrain run ./my/train.py"),
        ("-m pkg.train", "Type: python -m mpitrain run -m pkg.train"),
    ],
)
def test_a_mistake_among_the_flags_is_one_line(typed: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(typed.split())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": 0},
        {"global_batch_size": 0},
        {"micro_batch_size": 0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"seed": -1},
        {"name": ".."},
        {"name": "a/b"},
        {"name": ""},
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(values: dict) -> None:
    (field,) = values
    with pytest.raises(UsageError, match="--" + field.replace("_", "-")):
        TrainConfig(**values)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("report runs/a --price -1", "--price must be at least 0.0, found -1.0"),
        ("export runs/a o --max-shard-gb -3", "--max-shard-gb must be above 0.0"),
        ("supervise --min-nodes 0 --nodes 0", "--nodes must be at least 1, found 0"),
        ("replay runs/a --step 0", "--step must be at least 1, found 0"),
        ("serve --idle-minutes nan", "--idle-minutes must be finite, found nan"),
        ("sweep a.yaml --ranks-per-trial 0", "--ranks-per-trial must be at least 1"),
        ("check --start-timeout 0", "--start-timeout must be above 0, found 0.0"),
    ],
)
def test_each_command_refuses_a_number_below_its_minimum(typed: str, said: str) -> None:
    command, *words = typed.split()
    with pytest.raises(UsageError, match=re.escape(said)):
        read_flags(KINDS[command], words, program="x", files=False)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"on_nonfinite": "raise"}, "--on-nonfinite: found 'raise', expected stop or"),
        ({"schedule": "const"}, "or constant. Did you mean 'constant'?"),
        ({"precision": "bf16-mixed"}, "--precision: found 'bf16-mixed', expected fp32"),
        ({"optimizer": "AdamW"}, "or adadelta. Did you mean 'adamw'?"),
        ({"epochs": "1"}, "--epochs: found '1', expected a whole number."),
        ({"epochs": 1.5}, "--epochs: found 1.5, expected a whole number."),
        ({"epochs": None}, "--epochs: found None, expected a whole number."),
        ({"lr": "0.1"}, "--lr: found '0.1', expected a number."),
        ({"num_workers": "atuo"}, "a whole number or auto. Did you mean 'auto'?"),
        ({"random_flip": "yes"}, "--random-flip: found 'yes', expected True or False."),
        ({"time_limit": 90}, "--time-limit: found 90, expected a text."),
        ({"epochs": True}, "--epochs: found True, expected a whole number."),
        ({"lr": False}, "--lr: found False, expected a number."),
        ({"num_workers": True}, "found True, expected a whole number or auto"),
        ({"random_flip": np.array([1, 2])}, "found array([1, 2]), expected True"),
        ({"schedule": np.array([1, 2])}, "--schedule: found array([1, 2]), expected"),
        ({"lr": torch.tensor(0.1)}, "--lr: found tensor(0.1000), expected a number."),
    ],
)
def test_values_of_a_script_are_read_as_strictly_as_flags(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(**values)
    assert said in str(caught.value)


def test_numbers_of_numpy_and_whole_ones_are_numbers() -> None:
    config = TrainConfig(epochs=np.int64(3), lr=1, weight_decay=np.float32(0))  # type: ignore[arg-type]
    assert (config.epochs, config.peak_lr) == (3, 1)
    assert TrainConfig(random_flip=np.bool_(True)).random_flip  # type: ignore[arg-type]


NUMBERS = [
    (kind.__name__, flag)
    for kind in KINDS.values()
    for flag in flags_of(kind)
    if {int, float} & {flag.hint, *get_args(flag.hint)}
]


@pytest.mark.parametrize(("kind", "flag"), NUMBERS)
def test_every_number_has_a_minimum(kind: str, flag: Flag) -> None:
    assert max(flag.facts.minimum, flag.facts.above) > -math.inf, f"{kind}.{flag.field}"


@pytest.mark.parametrize("kind", KINDS.values())
def test_facts_name_fields_that_there_are(kind: Any) -> None:
    facts = facts_of(kind)
    for fact in facts.values():
        assert {*fact.only_with[:1], *fact.not_with[:1]} <= facts.keys()
        assert fact.may_change or not fact.changes_bits


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--tf32=True --random_flip=False", {"tf32": True, "random_flip": False}),
        ("--tf32 --no-tf32", {"tf32": False}),
        ("--no_new_run=False", {"new_run": True}),
        ("--num-workers 3 --image-size None", {"num_workers": 3}),
        ("--num-workers auto --weights None", {"num_workers": "auto"}),
        ("--log=csv wandb --lr 1", {"log": ("csv", "wandb"), "lr": 1.0}),
        ("--log csv --log wandb", {"log": ("wandb",)}),
        ("--log", {}),
        ("--runs-dir=--x", {"runs_dir": Path("--x")}),
    ],
)
def test_words_become_values(words: str, values: dict[str, Any]) -> None:
    assert read_config(words.split()) == TrainConfig(**values)


def help_of(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(HelpShown):
        read_config([flag])
    return capsys.readouterr().out


def test_help_all_answers_on_stdout_with_every_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = help_of("--help-all", capsys)
    for name in facts_of(TrainConfig).keys() - {"task_arguments"}:
        assert "--" + name.replace("_", "-") in said


def test_every_flag_is_explained_and_every_default_told_once() -> None:
    for flag in flags_of(TrainConfig):
        assert flag.text.endswith("."), flag
        assert len(flag.text) <= 120, flag
    lines = help_text(TrainConfig, program="x", epilog="").splitlines()
    at = lines.index("  --epochs INT                  Number of epochs. [10]")
    assert lines[at - 1 : at] == ["Optimization:"]
    assert not [
        it for it in " ".join(lines).split("  --") if "Default:" in it and "]" in it
    ]


def test_help_is_short_with_a_line_for_each_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = help_of("--help", capsys)
    common = [facts for facts in facts_of(TrainConfig).values() if facts.is_common]
    assert said.count("\n  --") == len(common) < 25
    for name in COMMANDS:
        assert f"\n  {name} " in said
    assert "--help-all shows all flags" in said


@dataclass(frozen=True, kw_only=True)
class Group:
    """A nested group."""

    number_of_things: int = 3
    """How many."""
    words: tuple[str, ...] = ()
    """Which words."""


@dataclass(frozen=True, kw_only=True)
class Nested:
    """Do something."""

    plain: bool = False
    """Whether."""
    group: Group = field(default_factory=lambda: Group(number_of_things=5))
    """Its fields are flags without a prefix."""


def test_flags_of_nested_groups_are_flat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("plain: true\nwords: [a, b]\n")
    words = ["--config", str(file), "--number-of-things", "7"]
    found = read_flags(Nested, words, program="x")
    assert found == Nested(
        plain=True, group=Group(number_of_things=7, words=("a", "b"))
    )
    with pytest.raises(UsageError, match="Did you mean '--number-of-things'"):
        read_flags(Nested, ["--number-of-thing", "7"], program="x")
    with pytest.raises(HelpShown):
        read_flags(Nested, ["--help"], program="x")
    help_lines = capsys.readouterr().out.splitlines()
    assert "A nested group:" in help_lines
    assert "  --number-of-things INT        How many. [5]" in help_lines


def test_version_answers_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mpitrain ")


def test_with_bitwise_nothing_that_changes_bits_is_free() -> None:
    with pytest.raises(UsageError, match="--bitwise does not go with --sync-batchnorm"):
        TrainConfig(bitwise=True, compile=True, sync_batchnorm=True)
    of_bits = {"micro_batch_size", "tf32"}
    assert of_bits <= TrainConfig().may_change
    assert not of_bits & TrainConfig(bitwise=True).may_change


def test_settings_without_effect_are_named() -> None:
    assert TrainConfig().without_effect() == []
    config = TrainConfig(
        optimizer="adamw", momentum=0.5, data_dir=Path("x"), epochs=2, warmup_epochs=2
    )
    named = " ".join(config.without_effect())
    for flag in ("--momentum", "--data-dir", "--warmup-epochs"):
        assert flag in named


def test_each_optimizer_has_a_learning_rate_of_its_own() -> None:
    assert TrainConfig().peak_lr == 0.05
    assert TrainConfig(global_batch_size=16).peak_lr == 0.025
    assert TrainConfig(global_batch_size=256).peak_lr == 0.1
    assert TrainConfig(global_batch_size=1024).peak_lr == 0.1
    assert TrainConfig(global_batch_size=16, lr=0.1).peak_lr == 0.1
    scaled = TrainConfig(global_batch_size=1024, scale_lr=True)
    assert scaled.peak_lr == pytest.approx(0.4)
    assert TrainConfig(optimizer="adamw").peak_lr == 0.001
    assert TrainConfig(optimizer="adamw", lr=0.3).peak_lr == 0.3


def test_the_default_learning_rate_does_not_depend_on_the_number_of_epochs() -> None:
    rates = {TrainConfig(epochs=num).peak_lr for num in (1, 2, 5, 100)}
    assert rates == {TrainConfig(epochs=0, probe_epochs=4).peak_lr} == {0.05}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--learning-rate 0.1", "--lr"),
        ("--batch-size=3", "--global-batch-size"),
        ("--batch_size 3", "--global-batch-size"),
        ("--epoch 3", "--epochs"),
        ("--hang-timeot 3", "--hang-timeout"),
        ("trian", "train"),
    ],
)
def test_the_word_that_was_meant_is_named(words: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(words.split())
    assert f" Did you mean '{meant}'?" in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_help_that_is_read_in_part_ends_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mpitrain", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
