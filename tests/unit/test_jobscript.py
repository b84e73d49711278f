"""`python -m mpitrain jobscript`: whole texts, and the scripts really run by bash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from mpitrain.cli import _folder_of, main
from mpitrain.errors import UsageError
from mpitrain.flags import read_flags
from mpitrain.mpi.launchers import LAUNCHERS
from mpitrain.settings import flag_name
from mpitrain.tools.jobs.jobscript import JobscriptConfig, text_of
from mpitrain.tools.jobs.launch_words import parse_words

ROOT = Path(__file__).parents[2]
SCHEDULERS = ("slurm", "pbs")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_demo_script_is_what_jobscript_writes(
    scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobscript", scheduler]) == 0
    demo = ROOT / scheduler / "demo.sh"
    assert capsys.readouterr().out == demo.read_text(), (
        f"to accept: python -m mpitrain jobscript {scheduler} > {scheduler}/demo.sh"
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_script_for_several_jobs_is_what_jobscript_writes(
    scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--jobs", "20", "--time", "1:00:00", "--name", "training"]
    assert main(["jobscript", scheduler, *words]) == 0
    script = ROOT / scheduler / "train.sh"
    assert capsys.readouterr().out == script.read_text(), (
        f"to accept: jobscript {scheduler} {' '.join(words)} > {scheduler}/train.sh"
    )


def lines_of(scheduler: Literal["slurm", "pbs"], **flags: Any) -> list[str]:
    text = text_of(JobscriptConfig(scheduler=scheduler, **flags), [])
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "{{" not in text
    assert "\n\n\n" not in text
    return text.splitlines()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"nodes": 3}, "#SBATCH --nodes=3"),
        ({"slots_per_node": 8}, "#SBATCH --ntasks-per-node=8"),
        ({"slots_per_node": 8}, "#SBATCH --gres=gpu:8"),
        ({"nodes": 3, "spare_nodes": 1, "jobs": 4}, "#SBATCH --nodes=4"),
        ({"time": "1:00", "jobs": 4}, "#SBATCH --signal=B:USR1@12"),
        ({"slots_per_node": 8, "gpus_per_node": 2}, "#SBATCH --gres=gpu:2"),
        ({"cpus_per_slot": 16}, "#SBATCH --cpus-per-task=16"),
        ({"mem": "120G"}, "#SBATCH --mem=120G"),
        ({"time": "1:00:00"}, "#SBATCH --time=01:00:00"),
        ({"account": "my-lab_7"}, "#SBATCH --account=my-lab_7"),
        ({"partition": "gpu,long"}, "#SBATCH --partition=gpu,long"),
        ({"name": "big.run"}, "#SBATCH --job-name=big.run"),
        ({"module": ("python/3.11", "my mpi")}, "module load python/3.11"),
        ({"module": ("python/3.11", "my mpi")}, "module load 'my mpi'"),
        ({"venv": Path("/sw/it's here")}, """venv='/sw/it'"'"'s here'"""),
        ({"venv": Path("my env")}, "venv=$PWD/'my env'"),
        ({"nodes": 1, "slots_per_node": 1}, "# Train on 1 node, 1 process on each, u"),
    ],
)
def test_a_flag_stands_in_slurms_own_words(flags: dict[str, Any], line: str) -> None:
    assert any(found.startswith(line) for found in lines_of("slurm", **flags))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"nodes": 3, "slots_per_node": 8, "mem": "2T"},
            "#PBS -l select=3:ncpus=32:mpiprocs=8:ompthreads=4:ngpus=8:mem=2tb",
        ),
        (
            {"gpus_per_node": 0, "cpus_per_slot": 2, "mem": None},
            "#PBS -l select=2:ncpus=8:mpiprocs=4:ompthreads=2",
        ),
        ({"time": "1:00:00"}, "#PBS -l walltime=01:00:00"),
        (
            {"nodes": 3, "spare_nodes": 2, "jobs": 4, "mem": None, "gpus_per_node": 0},
            "#PBS -l select=5:ncpus=16:mpiprocs=4:ompthreads=4",
        ),
        ({"account": "my-lab_7"}, "#PBS -A my-lab_7"),
        ({"queue": "gpu@head"}, "#PBS -q gpu@head"),
        ({"name": "big.run"}, "#PBS -N big.run"),
        ({"module": ("openmpi",)}, "module load openmpi"),
        ({"venv": Path("/sw/a b")}, "venv='/sw/a b'"),
    ],
)
def test_a_flag_stands_in_pbs_own_words(flags: dict[str, Any], line: str) -> None:
    assert line in lines_of("pbs", **flags)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_is_not_asked_for_leaves_no_line(scheduler: Any) -> None:
    flags = {"gpus_per_node": 0, "mem": None, "account": "lab", "module": ("x",)}
    lines = lines_of(scheduler, **flags)
    for word in ("gres", "ngpus", "mem=", "my_project", "# module load", "each GPU"):
        assert not [line for line in lines if word in line]


@pytest.mark.parametrize(
    ("scheduler", "given", "written"),
    [
        ("slurm", "30", "00:30:00"),  # minutes
        ("pbs", "30", "00:00:30"),  # seconds
        ("slurm", "90:00", "01:30:00"),
        ("pbs", "90:00", "01:30:00"),
        ("slurm", "1:00:00", "01:00:00"),
        ("pbs", "120:00:00", "120:00:00"),
        ("slurm", "2-12", "60:00:00"),
        ("slurm", "1-00:30", "24:30:00"),
        ("pbs", "1-00:30:05", "24:30:05"),
    ],
)
def test_times_are_read_as_the_scheduler_reads_them(
    scheduler: Any, given: str, written: str
) -> None:
    assert any(f"time={written}" in line for line in lines_of(scheduler, time=given))


@pytest.mark.parametrize(
    ("scheduler", "flags", "said"),
    [
        ("slurm", {"nodes": 0}, "--nodes must be at least 1, found 0"),
        ("slurm", {"slots_per_node": 0}, "--slots-per-node must be at least 1"),
        ("slurm", {"cpus_per_slot": 0}, "--cpus-per-slot must be at least 1"),
        ("slurm", {"gpus_per_node": -1}, "--gpus-per-node must be at least 0"),
        ("slurm", {"jobs": 0}, "--jobs must be at least 1"),
        ("slurm", {"spare_nodes": 1}, "--spare-nodes 1: a script for one job"),
        ("slurm", {"time": "soon"}, "--time 'soon'.*days-hours"),
        ("slurm", {"time": "0"}, "--time '0'"),
        ("slurm", {"time": "1:60:00"}, "--time '1:60:00'"),
        ("slurm", {"time": "1-24"}, "--time '1-24'"),
        ("slurm", {"time": "1:2:3:4"}, "--time '1:2:3:4'"),
        ("pbs", {"time": "1-"}, "--time '1-'"),
        ("pbs", {"time": "\u0661"}, "--time"),
        ("slurm", {"mem": "16"}, "--mem '16'.*16G"),
        ("slurm", {"mem": "0G"}, "--mem '0G'"),
        ("slurm", {"account": "a b"}, "--account 'a b'"),
        ("slurm", {"account": "a\n#SBATCH --x"}, "--account 'a.n#SBATCH"),
        ("slurm", {"account": ""}, "--account ''"),
        ("pbs", {"name": "a\nrm -rf x"}, "--name"),
        ("pbs", {"name": "7up"}, "--name '7up'"),
        ("slurm", {"partition": "a;b"}, "--partition 'a;b'"),
        ("pbs", {"queue": "-x"}, "--queue '-x'"),
        ("pbs", {"partition": "gpu"}, "--partition gpu.*PBS.*--queue"),
        ("slurm", {"queue": "gpu"}, "--queue gpu.*SLURM.*--partition"),
        ("slurm", {"module": ("a", "b\nc")}, r"--module 'b\\nc'"),
        ("slurm", {"venv": Path("a\nb")}, r"--venv 'a\\nb'"),
        ("slurm", {"venv": Path("\udcff")}, "--venv"),
    ],
)
def test_a_value_that_no_script_can_hold_is_refused_by_its_flag(
    scheduler: str, flags: dict[str, Any], said: str
) -> None:
    values = {**flags, "module": flags.get("module", ("gcc",))[-1]}
    words = [f"{flag_name(name)}={value}" for name, value in values.items()]
    with pytest.raises(UsageError, match=said):
        read_flags(JobscriptConfig, [scheduler, *words], program="x")


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "a\tb", "\udcff"])
def test_a_word_that_no_line_can_hold_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="after --"):
        text_of(JobscriptConfig(scheduler="slurm"), ["--data-dir", word])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epohs", "3"], "--epohs"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["train", "--lr", "fast"], "--lr"),
        (["scale"], "unknown command 'scale'. Expected one of train, run, sweep"),
        (["train.py", "--lr", "1"], "Type: -- run train.py --lr 1"),
        (["run"], "nothing to run is named"),
        (["run", "nowhere.py"], "nowhere.py' cannot be read as a script"),
        (["run", "--hang-timeout", "x", __file__], "--hang-timeout: found 'x'"),
    ],
)
def test_a_wrong_flag_of_the_training_is_told_before_it_is_queued(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobscript", "slurm", "--", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_check_that_fails_is_started_again_only_if_asked(
    scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--restarts", "2"]):
        assert main(["jobscript", scheduler, *flags, "--", "check"]) == 0
        text = capsys.readouterr().out
        assert f"supervise {' '.join([*flags, '--'])} " in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--new-run"], "--new-run has no place in a chain of jobs"),
        (["run", "script.py"], "the jobs of a script (`run`) resume --run-dir"),
        (["check"], "found 'check' after --"),
        (["--epohs", "3"], "--epohs"),
    ],
)
def test_what_several_jobs_cannot_go_on_with_is_told_before_it_is_queued(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobscript", "slurm", "--jobs", "5", "--", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


HOSTILE = [
    *("two words", "it's", 'say "no"', "$HOME", "`id`", "$(id)", "a;b|c&d", "*"),
    *("back\\slash", "{{name}}", "#not a comment", "~", "!x", "ünï", ""),
]

STAND_IN = """\
#!{python}
import json, os, pathlib, sys
if "supervise" in sys.argv or "mpitrain.tools.jobs.block_sigterm" in sys.argv:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if sys.argv[1:] == ["--version"]:
    print("mpirun (Open MPI) 5.0.11")
elif sys.argv[0].endswith("mpirun"):
    pathlib.Path({seen!r}).write_text(json.dumps(sys.argv[1:]))
    run_dir = pathlib.Path("runs/my-job")
    run_dir.mkdir(parents=True)
    (run_dir / "result.json").write_text('{{"status": "finished"}}')
    if "MPITRAIN_STATUS_FILE" in os.environ:
        pathlib.Path(os.environ["MPITRAIN_STATUS_FILE"]).write_text("0")
"""


@pytest.mark.parametrize("jobs", [1, 5])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_hostile_words_and_folders_reach_the_program_as_they_are(
    scheduler: Any, jobs: int, tmp_path: Path
) -> None:
    folder = tmp_path / "a $HOME 'b' \"c\" `d`"
    folder.mkdir()
    venv = Path("my env's {{name}}")
    seen = tmp_path / "seen.json"
    make_stand_ins(folder / venv, seen)
    words = ["--wandb-tags", *HOSTILE]
    config = JobscriptConfig(
        scheduler=scheduler,
        venv=venv,
        module=("a b", "c/1.0"),
        output=folder / "job",
        jobs=jobs,
    )
    done = run_script(text_of(config, words), folder, tmp_path, ["three small words"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["module: 2: load a b", "module: 2: load c/1.0"]
    said = json.loads(seen.read_text())
    at = said.index("python")
    more = {"slurm": ["three small words"], "pbs": ["--lr", "0.5"]}[scheduler]
    name = [] if jobs == 1 else ["--name", "my-job"]
    assert said[at:] == ["python", "-m", "mpitrain", *name, *words, *more]
    prefix = ["--bind-to", "none", "--prefix", str(folder / venv)]
    begin = said.index("--bind-to")
    assert said[begin : begin + len(prefix)] == prefix


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_signal_while_nodes_are_asked_is_no_failure(
    scheduler: Any, tmp_path: Path
) -> None:
    """No training is started then, and the job goes back to the queue as stopped."""
    seen = tmp_path / "seen.json"
    make_stand_ins(tmp_path / ".venv", seen)
    python = tmp_path / ".venv/bin/python"
    text = python.read_text() + (
        "import signal, time\n"
        "if 'hostfile' in sys.argv:\n"
        "    os.kill(os.getppid(), signal.SIGUSR1)\n"
        "    time.sleep(1)\n"
    )
    python.write_text(text)
    for name in ("scontrol", "qsub"):
        submit = (
            f'#!/bin/sh\necho {name} "$@" $MPITRAIN_JOB_NUMBER >"{tmp_path}/next"\n'
        )
        (tmp_path / ".venv/bin" / name).write_text(submit)
    config = JobscriptConfig(scheduler=scheduler, jobs=5)
    done = run_script(text_of(config, []), tmp_path, tmp_path, [])
    assert done.returncode == 75, done.stderr
    next_job = {
        "slurm": "scontrol requeue 7\n",
        "pbs": "qsub -N my-job -v ARGS,MPITRAIN_JOB_NUMBER -W depend=afterany:7 "
        f"{tmp_path}/job.sh 2\n",
    }
    assert (tmp_path / "next").read_text() == next_job[scheduler]
    assert not seen.exists()


@pytest.mark.parametrize(
    ("scheduler", "mpi"), [("slurm", "openmpi"), ("pbs", "openmpi"), ("slurm", "mpich")]
)
def test_at_term_a_job_waits_for_its_ranks_and_ends_with_their_status(
    scheduler: Any, mpi: str, tmp_path: Path
) -> None:
    """MPICH's mpirun would die of USR2: its ranks have got TERM from the scheduler."""
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    mpirun = tmp_path / ".venv/bin/mpirun"
    usr2 = {"openmpi": "sleep 1; exit 75", "mpich": "exit 99"}[mpi]
    end = {"openmpi": 99, "mpich": 75}[mpi]
    version = {"openmpi": "(Open MPI) 5", "mpich": "HYDRA build details: Version: 5"}[
        mpi
    ]
    mpirun.write_text(
        "#!/bin/bash\n"
        f"[ $1 = --version ] && echo '{version}' && exit\n"
        f"trap '{usr2}' USR2\n"
        "(sleep 1; kill -TERM $$ $PPID) &\n"  # as `scancel --full` and `qdel` do
        "for i in {1..30}; do sleep 0.1; done\n"
        f"exit {end}\n"
    )
    config = JobscriptConfig(scheduler=scheduler, launcher=mpi)  # type: ignore[arg-type]
    text = text_of(config, [])
    if mpi == "mpich":
        assert "supervise --launcher mpich --restarts 3 -- " in text
        text = text.replace(" --launcher mpich", "")  # it asks mpirun, too
    done = run_script(text, tmp_path, tmp_path, [])
    assert done.returncode == 75, done.stderr


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("mpirun", "rank_zero", "status"),
    [(0, "0", 0), (0, "75", 75), (0, "", 1), (3, "", 3), (3, "0", 3), (75, "", 75)],
)
def test_mpiruns_0_is_no_success_unless_rank_zero_says_so(
    scheduler: Any, mpirun: int, rank_zero: str, status: int, tmp_path: Path
) -> None:
    """Open MPI's ends with 0 where it has lost a node."""
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    (tmp_path / ".venv/bin/mpirun").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f'printf %s "{rank_zero}" >"$MPITRAIN_STATUS_FILE"\nexit {mpirun}\n'
    )
    text = text_of(JobscriptConfig(scheduler=scheduler), [])
    done = run_script(text, tmp_path, tmp_path, [])
    assert done.returncode == status, done.stderr


def test_rank_zeros_status_is_written_where_the_script_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPITRAIN_STATUS_FILE", str(tmp_path / "status"))
    for words, status in ((["--help"], "0"), (["--epohs", "3"], "2")):
        main(words)
        assert (tmp_path / "status").read_text() == f"{status}\n"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("MPITRAIN_STATUS_FILE", str(tmp_path / "other"))
    main(["--epohs", "3"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_script_that_stopped_resumes_in_the_next_job(
    scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its status 75; 0 ends the chain, with or without a result of mpitrain."""
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    words = ["--jobs", "5", "--run-dir", "runs/my own", "--", "run", __file__, "--x"]
    assert main(["jobscript", scheduler, *words]) == 0
    text = capsys.readouterr().out
    for name in ("scontrol", "qsub"):
        submit = f'#!/bin/sh\necho "$1" >"{tmp_path}/next"\n'
        (tmp_path / ".venv/bin" / name).write_text(submit)
    mpirun = tmp_path / ".venv/bin/mpirun"
    for status, next_job in ((0, None), (75, {"slurm": "requeue\n", "pbs": "-N\n"})):
        mpirun.write_text(
            "#!/bin/sh\n[ $1 = --version ] && echo '(Open MPI) 5' && exit\n"
            f'echo "$@" >>{tmp_path}/words\necho {status} >$MPITRAIN_STATUS_FILE\n'
            f"exit {status}\n"
        )
        done = run_script(text, tmp_path, tmp_path, [])
        assert done.returncode == status, done.stderr
        assert (tmp_path / "next").exists() == bool(next_job)
        assert not next_job or (tmp_path / "next").read_text() == next_job[scheduler]
    started = (tmp_path / "words").read_text().splitlines()[-1]
    assert f"python -m mpitrain run {__file__} --x" in started
    assert "--name" not in started


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_without_python_where_it_should_be_the_script_says_so(
    scheduler: Any, tmp_path: Path
) -> None:
    text = text_of(JobscriptConfig(scheduler=scheduler, module=()), [])
    done = run_script(text, tmp_path, tmp_path, [])
    assert done.returncode == 1
    assert f"no virtual environment in {tmp_path}/.venv" in done.stderr


def test_the_way_to_another_node_is_tried_wherever_the_file_names_it(
    tmp_path: Path,
) -> None:
    """With place=free the last chunk may be on the first node again."""
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    text = text_of(JobscriptConfig(scheduler="pbs"), [])
    nodes = "node1\nnode2.invalid\nnode1\n"
    done = run_script(text, tmp_path, tmp_path, [], nodes=nodes)
    assert done.returncode == 1
    said = "cannot reach node2.invalid: no ssh, and no pbs_tmrsh either"
    assert said in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("reach", "words"), [("ssh", ["node2"]), ("pbs_tmrsh", ["node2", "/bin/sh", "-c"])]
)
def test_what_holds_the_other_nodes_of_a_pbs_job_outlives_term(
    reach: str, words: list[str], tmp_path: Path
) -> None:
    """PBS sends it to all processes; without its ssh mpirun loses a node at once."""
    folder = tmp_path / "a $HOME 'b' \"c\""
    make_stand_ins(folder / ".venv", tmp_path / "seen.json")
    programs = {
        "mpirun": "$PRTE_MCA_plm_ssh_agent node2 'echo \"a  b\"; x=$y'\n",
        "ssh": f"case $* in *BatchMode*) [ {reach} = ssh ]; exit;; esac\n",
        "pbs_tmrsh": "",
    }
    for name, lines in programs.items():
        if name != "mpirun":
            lines += f"kill -TERM $$\necho {name} lives\nprintf '%s\\n' \"$@\"\n"
        (folder / ".venv/bin" / name).write_text(f"#!/bin/sh\n{lines}")
        (folder / ".venv/bin" / name).chmod(0o755)
    text = text_of(JobscriptConfig(scheduler="pbs"), [])
    done = run_script(text, folder, tmp_path, [], nodes="node1\nnode2\n")
    said = [f"{reach} lives", *words, 'echo "a  b"; x=$y']
    assert done.stdout.splitlines()[-len(said) :] == said, done.stderr


@pytest.mark.parametrize("place", ["site/bin", ".venv/bin"])
def test_daemons_of_slurms_other_nodes_outlive_term(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sends it to all processes; mpirun may be the one of a module."""
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    (tmp_path / ".venv/bin/mpirun").unlink()
    lives = "kill -TERM $$; echo ${0##*/} lives"
    lines = "$PRTE_MCA_prte_launch_agent\n$OMPI_MCA_orte_launch_agent"
    (folder := tmp_path / place).mkdir(parents=True, exist_ok=True)
    for name, text in (("mpirun", lines), ("prted", lives), ("orted", lives)):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    text = text_of(JobscriptConfig(scheduler="slurm"), [])
    done = run_script(text, tmp_path, tmp_path, [])
    assert done.stdout.split("\n")[-3:-1] == ["prted lives", "orted lives"], done.stderr


def test_the_other_nodes_get_the_environment_whatever_sbatch_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variable that sbatch sets, and mpirun's own srun obeys."""
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    (tmp_path / ".venv/bin/mpirun").write_text("#!/bin/sh\necho $SLURM_EXPORT_ENV\n")
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    text = text_of(JobscriptConfig(scheduler="slurm"), [])
    done = run_script(text, tmp_path, tmp_path, [])
    assert done.stdout.splitlines()[-1] == "ALL", done.stderr


def test_mpiruns_line_for_the_remote_shell_bears_a_folder_with_blanks(
    tmp_path: Path,
) -> None:
    """Open MPI does not quote --prefix there."""
    venv = tmp_path / "it's a $HOME" / ".venv"
    venv.parent.mkdir()
    venv.symlink_to(sys.prefix)
    line = (
        f"X={venv};export X;{venv}/bin/python -c 'import os; print(os.environ[\"X\"])'"
    )
    agent = [f"{venv}/bin/python", "-m", "mpitrain.tools.jobs.block_sigterm"]
    done = subprocess.run([*agent, "sh", "-c", line], capture_output=True, text=True)
    assert done.stdout == f"{venv}\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_a_user_sends_to_the_whole_job_stops_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    (tmp_path / ".venv/bin/mpirun").write_text(
        "#!/bin/bash\n[ $1 = --version ] && echo '(Open MPI) 5' && exit\n"
        f"trap 'exit 75' USR2\n(sleep 1; kill -{number} $PPID) &\n"
        "for i in {1..50}; do sleep 0.1; done\n"
    )
    text = text_of(JobscriptConfig(scheduler="slurm"), [])
    assert run_script(text, tmp_path, tmp_path, []).returncode == 75


def test_folders_of_jobs_that_were_killed_are_removed_later(tmp_path: Path) -> None:
    make_stand_ins(tmp_path / ".venv", tmp_path / "seen.json")
    for name, age in ((".mpitrain-aaaaaaaa", 90000), (".mpitrain-bbbbbbbb", 600)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status").touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    text = text_of(JobscriptConfig(scheduler="slurm"), [])
    assert run_script(text, tmp_path, tmp_path, []).returncode == 0
    left = [it.name for it in tmp_path.glob(".mpitrain-*")]
    assert left == [".mpitrain-bbbbbbbb"]


def make_stand_ins(venv: Path, seen: Path) -> None:
    """Make an environment whose mpirun writes down its words."""
    (venv / "bin").mkdir(parents=True)
    text = STAND_IN.format(python=sys.executable, seen=str(seen))
    for name in ("python", "mpirun", "scontrol", "qsub"):
        (venv / "bin" / name).write_text(text)
        (venv / "bin" / name).chmod(0o755)


def run_script(
    text: str,
    submitted_from: Path,
    scratch: Path,
    words: list[str],
    *,
    nodes: str = "node1\n" * 4,
) -> subprocess.CompletedProcess[str]:
    """Run a job script to its end, as a scheduler would on the first node."""
    (scratch / "job.sh").write_text(text)
    (scratch / "nodes").write_text(nodes)
    told = {
        "SLURM_SUBMIT_DIR": str(submitted_from),
        "PBS_O_WORKDIR": str(submitted_from),
        "PBS_NODEFILE": str(scratch / "nodes"),
        "SLURM_JOB_NAME": "my-job",
        "PBS_JOBID" if "#PBS" in text else "SLURM_JOB_ID": "7",
        "PBS_CONF_FILE": os.devnull,
        "PBS_JOBNAME": "my-job",
        "ARGS": "--lr 0.5",
        "BASH_FUNC_module%%": '() { echo "module: $#: $*"; }',
    }
    return subprocess.run(
        ["timeout", "-k", "5", "60", "bash", str(scratch / "job.sh"), *words],
        cwd=scratch,
        env={**os.environ, **told},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_launcher_without_options_has_no_empty_array(scheduler: Any) -> None:
    """Under `set -u` bash before 4.4, as of RHEL 7, ends at one."""
    for jobs in (1, 5):
        lines = lines_of(scheduler, launcher="mpich", jobs=jobs)
        assert [it for it in lines if "options=(" in it or "options[" in it] == []
        assert [it for it in lines if it.startswith("    mpirun python -m mpitrain ")]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("jobs", ["1", "5"])
def test_the_training_can_start_from_a_staged_environment(
    capsys: pytest.CaptureFixture[str], scheduler: str, jobs: str
) -> None:
    words = ["jobscript", scheduler, "--jobs", jobs, "--stage", "--", "--epochs", "3"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "python -m mpitrain stage -- python -m mpitrain --" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_chain_knows_the_run_folder_of_a_staged_training() -> None:
    words = "mpirun python -m mpitrain stage -- python -m mpitrain --name mine"
    flags = parse_words(words.split(), LAUNCHERS["openmpi"]).flags
    assert _folder_of(flags) == Path("runs/mine")
