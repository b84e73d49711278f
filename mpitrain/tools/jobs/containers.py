"""The words that run a rank in a container: mpirun outside, ranks inside.

They pass on the environment, /tmp, shared memory and the network of the host. Tried:
Charliecloud 0.31. Not tried: the others, from apptainer.org, docs.nersc.gov and
docs.podman.io.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

from mpitrain.errors import UsageError

Runtime = Literal[
    "apptainer", "singularity", "charliecloud", "podman", "podman-hpc", "shifter"
]

# ``{flags}`` are the user's, else the runtime's own.
_PODMAN = (
    "run --rm --env-host --network=host --ipc=host --pid=host --uts=host {flags} "
    '--volume "$PWD:$PWD" --volume /tmp:/tmp --workdir "$PWD" {image}'
)
WORDS: dict[str, str] = {
    "apptainer": 'apptainer exec {flags} --bind "$PWD" --pwd "$PWD" {image}',
    "singularity": 'singularity exec {flags} --bind "$PWD" --pwd "$PWD" {image}',
    # It would mount TMPDIR as /tmp, and nothing below that.
    "charliecloud": 'env -u TMPDIR ch-run {flags} --bind="$PWD" --cd="$PWD" {image} --',
    "podman": f"podman {_PODMAN}",
    "podman-hpc": f"podman-hpc {_PODMAN}",
    "shifter": "shifter {flags} --image={image}",
}
GPU_FLAGS = {
    **dict.fromkeys(("apptainer", "singularity"), "--nv"),
    "podman": "--device nvidia.com/gpu=all",
    "podman-hpc": "--gpu",
}


def words_of(
    image: str, runtime: Runtime | None, flags: Sequence[str] = (), num_gpus: int = 1
) -> str:
    r"""Return shell words that stand before ``python``, to run it in an image.

    >>> words_of("my image.sif", None, ["--rocm"])
    'apptainer exec --rocm --bind "$PWD" --pwd "$PWD" \'my image.sif\''
    >>> words_of("two  blanks.sif", None, num_gpus=0)
    'apptainer exec --bind "$PWD" --pwd "$PWD" \'two  blanks.sif\''
    """
    if runtime is None:
        if not image.endswith(".sif"):
            raise UsageError(
                f"--container {image}: expected --container-runtime beside it, or the "
                "name of a file .sif (apptainer pull makes one)"
            )
        runtime = "apptainer"
    given = shlex.join(flags) or GPU_FLAGS.get(runtime, "") * bool(num_gpus)
    words = WORDS[runtime] if given else WORDS[runtime].replace("{flags} ", "")
    return words.format(image=shlex.quote(image), flags=given)
