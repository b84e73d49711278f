"""mpirun outside, ranks in containers: Charliecloud on two hosts.

The image is a root folder of its own, into which a wrapper of `ch-run` mounts the
folders with this machine's programs: so nothing need be downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import debian
import pytest
from launcher import slow

from mpitrain.cli import main

from .hosts import VirtualHosts
from .slurm import Slurm

ROOT = Path(__file__).parents[2]
FOLDERS = {"usr", ROOT.parts[1], Path(sys.base_prefix).parts[1]} - {"tmp"}
ROOTS = ("dev", "etc", "home", "mnt", "proc", "run", "srv", "sys", "tmp", "var")
FLAGS = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-slot=1"]

MODEL = """
from pathlib import Path
from torch import nn

def model(num_classes: int) -> nn.Module:
    assert Path("/etc/inside").exists(), "this rank is in no container"
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder without programs, into which those of this machine are mounted."""
    if shutil.which("ch-run") is None and (wrong := debian.install("charliecloud")):
        if os.environ.get("CI") == "true":
            pytest.fail(wrong)
        pytest.skip(wrong)
    root = tmp_path_factory.mktemp("image")
    for name in {*FOLDERS, *ROOTS}:
        (root / name).mkdir()
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf", "inside"):
        (root / "etc" / name).touch()
    return root


@pytest.fixture
def place(folder: Path) -> Path:
    """A folder to submit from; `bin/ch-run` mounts the machine's programs."""
    (folder / "bin").mkdir()
    binds = " ".join(f"--bind=/{name}:/{name}" for name in sorted(FOLDERS))
    program = f'export USER=root\nexec /usr/bin/ch-run {binds} "$@"\n'
    wrapper = folder / "bin/ch-run"
    wrapper.write_text(f"#!/bin/bash\n{program}")
    wrapper.chmod(0o755)
    (folder / "inside.py").write_text(MODEL)
    return folder


def check_finished(place: Path, output: str, world_size: int = 2) -> None:
    """The run ended well on two hosts: whichever SLURM had free."""
    (file,) = place.glob("runs/*/result.json")
    result = json.loads(file.read_text())
    found = [result.get(it) for it in ("status", "world_size", "num_nodes")]
    assert found == ["finished", world_size, 2], output


@pytest.mark.parametrize(("jobs", "slots"), [slow(1, 2), (2, 1)])
def test_ranks_in_containers_on_two_hosts_train_together(
    jobs: int, slots: int, slurm: Slurm, place: Path, image: Path
) -> None:
    flags = [*FLAGS, "--container", str(image), "--container-runtime", "charliecloud"]
    flags += ["--slots-per-node", str(slots)]
    flags += ["--setup", f"export PATH={place}/bin:$PATH", "--jobs", str(jobs)]
    words = ["--epochs", "2", "--model", "inside:model"]
    script = ["--output", f"{place}/job.sh", "--", *words]
    assert main(["jobscript", "slurm", *flags, *script]) == 0
    job = slurm.sbatch("job.sh", cwd=place, timeout_seconds=180)
    assert job.exit_code == "0:0", job.output
    check_finished(place, job.output, 2 * slots)


IMITATION = """
import os, sys
sys.path.pop(0)
LISTS = {
    "apptainer": ("exec", ("--nv", "--rocm"), ("--bind", "--pwd", "--env")),
    "shifter": ("", (), ("--image", "--volume", "--env")),
    "podman": (
        "run",
        ("--rm", "--env-host"),
        ("--network", "--ipc", "--pid", "--uts", "--volume", "--workdir", "--device"),
    ),
}
name, *words = sys.argv[1:]
command, without, with_value = LISTS[name]
if command:
    assert words.pop(0) == command, words
image = ""
while words[0].startswith("-"):
    option, equals, value = words.pop(0).partition("=")
    if option in with_value:
        value = value if equals else words.pop(0)
        image = value if option == "--image" else image
    else:
        assert option in without and not equals, option
image = image or words.pop(0)
os.environ["FAKE_IMAGE"] = image
os.execvp(words[0], words)
"""


@pytest.mark.parametrize("runtime", ["apptainer", slow("shifter"), slow("podman")])
def test_the_words_for_other_runtimes_are_documented_ones(
    runtime: str, slurm: Slurm, place: Path
) -> None:
    """By programs in their place, which start the rank in no container."""
    (place / "imitation.py").write_text(IMITATION)
    program = place / "bin" / runtime
    program.write_text(
        f'#!/bin/bash\nexec {sys.executable} {place}/imitation.py {runtime} "$@"\n'
    )
    program.chmod(0o755)
    checked = MODEL.replace(
        'Path("/etc/inside").exists()', '"FAKE_IMAGE" in os.environ'
    )
    (place / "inside.py").write_text("import os\n" + checked)
    flags = [*FLAGS, "--container", "image.sif", "--container-runtime", runtime]
    flags += ["--slots-per-node", "1"]
    flags += ["--setup", f"export PATH={place}/bin:$PATH"]
    words = ["--epochs", "1", "--model", "inside:model"]
    script = ["--output", f"{place}/job.sh", "--", *words]
    assert main(["jobscript", "slurm", *flags, *script]) == 0
    job = slurm.sbatch("job.sh", cwd=place, timeout_seconds=180)
    assert job.exit_code == "0:0", job.output
    check_finished(place, job.output)


def test_an_mpi_inside_that_is_not_the_one_outside_is_refused(
    hosts: VirtualHosts, place: Path, image: Path
) -> None:
    library = f"MPI4PY_LIBMPI={ROOT}/.venv-mpich/lib/libmpi.so.12"
    words = [f"--bind={place}", f"--cd={place}", str(image), "--", "env", library]
    words += [sys.executable, "-m", "mpitrain", "--epochs", "1"]
    mpirun = Path(sys.executable).with_name("mpirun")
    start = ["env", "-u", "TMPDIR", str(mpirun), "-np", "2", "--oversubscribe"]
    done = hosts.run("node1", [*start, f"{place}/bin/ch-run", *words], cwd=place)
    assert done.returncode != 0
    assert "but mpi4py loads MPICH" in done.stdout
