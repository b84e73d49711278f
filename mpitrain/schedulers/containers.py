"""The words that run a rank in a container: mpirun outside, ranks inside.

They pass on the environment, /tmp, shared memory and the network of the host. Tried:
Charliecloud 0.31. Not tried: the others, from apptainer.org, docs.nersc.gov and
docs.podman.io.
"""

from __future__ import annotations

import shlex
from typing import Literal

from mpitrain.errors import UsageError

Runtime = Literal["apptainer", "charliecloud", "podman", "podman-hpc", "shifter"]

_PODMAN = (
    "run --rm --env-host --network=host --ipc=host --pid=host --uts=host "
    '--volume "$PWD:$PWD" --volume "${TMPDIR:-/tmp}:${TMPDIR:-/tmp}" --workdir "$PWD"'
)
WORDS: dict[str, str] = {
    "apptainer": 'apptainer exec --nv --bind "$PWD" --pwd "$PWD" {image}',
    # It would mount TMPDIR as /tmp, and nothing below that.
    "charliecloud": 'env -u TMPDIR ch-run --bind="$PWD" --cd="$PWD" {image} --',
    "podman": f"podman {_PODMAN} {{image}}",
    "podman-hpc": f"podman-hpc {_PODMAN} --gpu {{image}}",
    "shifter": "shifter --image={image}",
}


def words_of(image: str, runtime: Runtime | None) -> str:
    r"""Return shell words that stand before ``python``, to run it in an image.

    >>> words_of("my image.sif", None)
    'apptainer exec --nv --bind "$PWD" --pwd "$PWD" \'my image.sif\''
    """
    if runtime is None:
        if not image.endswith(".sif"):
            raise UsageError(
                f"--container {image}: expected --container-runtime beside it, or the "
                "name of a file .sif"
            )
        runtime = "apptainer"
    return WORDS[runtime].format(image=shlex.quote(image))
