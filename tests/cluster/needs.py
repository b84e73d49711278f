"""What the virtual hosts need of this machine, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import debian

PACKAGES = {
    "ip": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "generate_pbs_nodefile": "slurm-wlm-torque",
}
"""The Debian package that each program comes from."""

SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"
"""Daemons live in sbin folders, which a user's PATH may lack."""


class MissingError(RuntimeError):
    """The machine cannot hold virtual hosts; the message says why."""


def provide(*programs: str) -> None:
    """Make sure that programs are there, by apt where that is needed.

    Raises:
        MissingError: They are not there and cannot be installed, or this
            process may not make network namespaces.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise MissingError("virtual hosts need Linux, and root")
    probe = ["unshare", "--net", "--mount", "--uts", "true"]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        raise MissingError("this root may not make network namespaces (unshare --net)")
    missing = [name for name in programs if which(name) is None]
    if missing:
        wrong = debian.install(*sorted({PACKAGES[name] for name in missing}))
        if wrong:
            raise MissingError(wrong)
    missing = [name for name in programs if which(name) is None]
    if missing:
        raise MissingError(f"apt installed all, yet {missing} are not on {SEARCH_PATH}")


def which(program: str) -> str | None:
    """Return the path of a program, daemons included."""
    return shutil.which(program, path=SEARCH_PATH)
