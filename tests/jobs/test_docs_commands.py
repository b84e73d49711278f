"""Commands of the pages are run; those that cannot be are in a table, with why.

A command is a line of a block, indented or fenced, that begins with `python`, `mpirun`
or `make`. It is run by bash as it is, in a folder with small files of the names that
the pages use. Of the commands of a page that start ranks or import torch, the first is
run; all others, which take a second each, are run, too. The flags of all are parsed in
`tests/unit/test_docs.py`. What is changed, so that they take minutes and not hours:

- `-np 4` becomes `-np 2`;
- what trains gets `--dry-run`: all is started, read and built, for one step;
- `check` gets `--quick`, which leaves the bandwidth out;
- `benchmarks/scaling.py` gets one round of 1 and 2 ranks;
- a sweep gets two trials.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from example_files import own_task, own_training, write_all, write_folder
from launcher import ROOT, environment, slow

pytestmark = pytest.mark.usefixtures("warm_starts")

PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name / "README.md" for name in ("slurm", "pbs", "hostfiles")),
)
"""`examples/README.md` has a test of its own: `test_examples.py` runs all of it."""

HOSTS = "wants hosts that are reached by ssh; tests/cluster has such ones"
INTERNET = "downloads"
SETS_UP = "sets up an environment, or runs all tests"
CORES = "wants 16 cores"
CLUSTER = "stands for a job's own mpirun"
CONTAINERS = "wants Apptainer and an image; tests/cluster has containers"
STAGES = "copies the whole environment; test_stage.py has a small one"
REPLAYS = "wants a run with a NaN, or two runs; test_replay.py does"
LIBRARY = "wants a run with a model of Transformers; test_export_folders.py does"
SERVES = "runs until it is ended; test_warm.py does"
FOREIGN = "another project's command line, as people have it"

NOT_RUN = {
    "make demo": SETS_UP,
    "make test": SETS_UP,
    "make test-all": SETS_UP,
    "make check": SETS_UP,
    "make format": SETS_UP,
    "make docs": SETS_UP,
    "make test-unit": SETS_UP,
    "make test-4": SETS_UP,
    "make test-jobs": SETS_UP,
    "make test-cluster": SETS_UP,
    'make test-versions PAIRS="2.14:python3.12"': SETS_UP,
    'mpirun --hostfile hostfiles/mine --prefix "$PWD/.venv" -x PATH'
    " python -m mpitrain": HOSTS,
    "mpirun --hostfile hosts python -m mpitrain": HOSTS,
    "mpirun -np 2 --map-by slot:PE=8 python -m mpitrain": CORES,
    "mpirun -np 8 --hostfile $PBS_NODEFILE --oversubscribe"
    " -x MASTER_ADDR=$(hostname) -x MASTER_PORT=$MASTER_PORT"
    " -x CUDA_VISIBLE_DEVICES=0,1,2,3 -x PATH -bind-to none -map-by :OVERSUBSCRIBE"
    " -mca pml ob1 -mca btl ^openib python main.py --ddp": FOREIGN,
    'python benchmarks/scaling.py --ranks 4 8 16 --mpirun "mpirun ${options[*]}" --'
    " --model resnet50": CLUSTER,
    "mpirun -np 4 --oversubscribe python -m mpitrain stage"
    " -- python -m mpitrain --epochs 10": STAGES,
    "mpirun -np 4 --oversubscribe python -m mpitrain stage --to /tmp"
    " -- python train.py": STAGES,
    "mpirun -np 4 --oversubscribe python -m mpitrain stage"
    " -- python -m mpitrain run train.py": STAGES,
    "mpirun -np 4 --oversubscribe python -m mpitrain stage --data data/birds"
    " -- python -m mpitrain --data folder --data-dir data/birds": STAGES,
    "mpirun -np 8 apptainer exec --nv mpitrain.sif python -m mpitrain": CONTAINERS,
    "python -m mpitrain serve": SERVES,
    "mpirun --map-by ppr:1:node python -m mpitrain serve": SERVES,
    "python -m mpitrain export runs/NAME folder --format huggingface": LIBRARY,
    "python -m mpitrain replay runs/mine --until nan": REPLAYS,
    "python -m mpitrain replay runs/mine --until nan -- run train.py": REPLAYS,
    "python -m mpitrain diff runs/new runs/old --replay --with ../old": REPLAYS,
    "python -m mpitrain fetch mnist cifar100 --data-dir /scratch/me/data": INTERNET,
    "python -m mpitrain fetch resnet50 timm:vit_small_patch14_dinov2": INTERNET,
    "python -m mpitrain fetch hub:facebookresearch/dinov2:dinov2_vitl14": INTERNET,
}
"""The commands of the pages that are not run, and why."""

TRAIN = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print(f"done {dist.get_rank()}/{dist.get_world_size()}")
dist.destroy_process_group()
"""

COMMAND = re.compile(r"make \w|python -m mpitrain|python \S+\.py|mpirun .*python")


def commands_of(text: str) -> list[str]:
    """Return the commands of a page: lines that go on joined, without comments."""
    found = []
    fence = ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif line.startswith("    ") or fence in ("```", "```bash", "```sh"):
            command = " ".join(line.partition(" # ")[0].split())
            if COMMAND.match(command):
                found.append(command)
    return found


def test_the_commands_of_a_page_are_found() -> None:
    page = "text\n\n    make demo   # all\n"
    page += "    python -m mpitrain \\\n        --epochs 2\n"
    page += "```bash\nmpirun -np 2 python -m mpitrain\n```\n```python\nmake = 1\n```\n"
    page += "`make test`\n    echo nothing\n"
    assert commands_of(page) == [
        "make demo",
        "python -m mpitrain --epochs 2",
        "mpirun -np 2 python -m mpitrain",
    ]


ON_PAGES = {page: commands_of(page.read_text()) for page in PAGES}

LIGHT = re.compile(r"python -m mpitrain (export|hostfile|jobscript|report|watch)\b")


def test_the_table_has_nothing_that_no_page_has() -> None:
    found = {command for commands in ON_PAGES.values() for command in commands}
    assert [command for command in NOT_RUN if command not in found] == []


def chosen(commands: list[str]) -> list[str]:
    """Return the commands of a page that are run: light ones, and one that is not."""
    possible = [command for command in commands if command not in NOT_RUN]
    light = [command for command in possible if LIGHT.match(command)]
    return light + [command for command in possible if command not in light][:1]


def smaller(command: str) -> str:
    """Return what is run for a command of a page."""
    command = re.sub(r"-np \d+", "-np 2", command)
    if command.startswith("mpirun"):
        command = re.sub(r"--trials \d+", "--trials 2", command)
    _, is_ours, words = command.partition("-m mpitrain")
    if "benchmarks/scaling.py" in command:
        return re.sub(r"--ranks [\d ]+--", "--ranks 1 2 --rounds 1 --", command)
    if words.startswith(" check"):
        return command.replace(" check", " check --quick", 1)
    trains = is_ours and words[:3] in ("", " --")
    return f"{command} --dry-run" if trains and "--dry-run" not in words else command


def command_params() -> list[object]:
    """Return all commands that are run; those that repeat what others do are slow."""
    commands = (smaller(c) for some in ON_PAGES.values() for c in chosen(some))
    found: list[object] = list(dict.fromkeys(commands))
    repeated: list[object] = []
    for kind, num_in_ci in (
        ("mpirun.*--dry-run", 3),
        (r"mpirun .*python (\S+\.py|-m \w+ run)", 1),
        (" export ", 1),
        (" report ", 1),
        # Of these each has a file of tests.
        ("mpirun.* (check|sweep) |benchmarks/", 0),
    ):
        repeated += [c for c in found if re.search(kind, str(c))][num_in_ci:]
    return [slow(c) if c in repeated else c for c in found]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that has ended."""

    status: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"status {self.status}\n{self.out}{self.err}"


def run(command: str, home: Path) -> Ran:
    """Run a command as it stands, in `home`."""
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    if "mpitrain hostfile" in command:  # in a job, whose nodes are those of the example
        nodes = ROOT / "hostfiles/pbs"
        variables |= {"PBS_JOBID": "1.server", "PBS_NODEFILE": str(nodes)}
    done = subprocess.run(
        ["timeout", "-k", "10", "150", "bash", "-c", command],
        cwd=home,
        env=environment(XDG_CACHE_HOME=str(home), **variables),  # its torch/
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return Ran(status=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages speak of: data, runs, scripts of one's own."""
    from torchvision.models import resnet18

    home = tmp_path_factory.mktemp("pages")
    write_all(home)
    write_folder(home / "data/birds")
    for name in ("benchmarks", "examples", "hostfiles"):
        (home / name).symlink_to(ROOT / name)
    (home / "train.py").write_text(TRAIN)
    for name, program in own_training().items():
        (home / name).write_text(program)
    (home / "mine.py").write_text(own_task())
    page = (ROOT / "docs/howto/sites.md").read_text()
    (home / "mine.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    (home / "package").mkdir()
    (home / "package/module.py").write_text(TRAIN)
    (home / "train.sh").write_text('#!/bin/sh\necho "done $RANK/$WORLD_SIZE"\n')
    (home / "train.sh").chmod(0o755)
    began = run("python -m mpitrain --epochs 1 --name long", home)
    assert began.status == 0, began
    for name in ("mine", "NAME", "a", "b", "first", "continued"):
        shutil.copytree(home / "runs/long", home / "runs" / name)
    weights = tmp_path_factory.mktemp("weights") / "model.pt"  # copied as a link
    torch.save(resnet18(num_classes=10).state_dict(), weights)
    (home / "runs/mine/model.pt").unlink()
    (home / "runs/mine/model.pt").symlink_to(weights)
    return home


@pytest.fixture
def home(files: Path, tmp_path: Path) -> Path:
    """The files, and nothing that another command has left."""
    return shutil.copytree(files, tmp_path / "here", symlinks=True)


@pytest.mark.parametrize("command", command_params())
def test_the_commands_of_the_pages_run(command: str, home: Path) -> None:
    done = run(command, home)
    assert done.status == 0, done
    if "--dry-run" in command and "jobscript" not in command:
        assert "finished: " in done.out, done
    if " check" in command and "--json" not in command and "jobscript" not in command:
        assert "errors: 0" in done.out, done
    if "mpitrain run" in command and "jobscript" not in command:
        size = 2 if "mpirun" in command else 1
        told = sorted(re.findall(r"done (\d)/(\d)", done.out))
        assert told == [(str(rank), str(size)) for rank in range(size)], done
    written = re.search(r"(?:--output|export \S+) (\S+)", command)
    if written is not None:
        path = home / written[1]
        text = (path / ".metadata" if path.is_dir() else path).read_bytes()
        assert text
        if text.startswith(b"#!/bin/bash"):
            said = subprocess.run(["bash", "-n"], input=text, capture_output=True)
            assert said.returncode == 0, said.stderr


@pytest.mark.parametrize(
    "command",
    [
        "python -m mpitrain --epoch 5 --dry-run",
        "mpirun -np 2 --oversubscribe python -m mpitrain --modell resnet18 --dry-run",
        "python -m mpitrain jobscript slurm --output job.sh -- --epoch 5",
        "python -m mpitrain export runs/nothing.pt model.pt",
    ],
)
def test_a_command_that_is_wrong_is_noticed(command: str, home: Path) -> None:
    assert run(command, home).status != 0
