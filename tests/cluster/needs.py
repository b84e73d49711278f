"""What the virtual hosts need of this machine, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

INSTALL_SECONDS = 400
POLICY = Path("/usr/sbin/policy-rc.d")


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
        _install(sorted({PACKAGES[name] for name in missing}))
    missing = [name for name in programs if which(name) is None]
    if missing:
        raise MissingError(f"apt installed all, yet {missing} are not on {SEARCH_PATH}")


def which(program: str) -> str | None:
    """Return the path of a program, daemons included."""
    return shutil.which(program, path=SEARCH_PATH)


def _install(packages: list[str]) -> None:
    if shutil.which("apt-get") is None:
        raise MissingError(f"no apt-get here to install {packages}")
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    with _no_services_started():
        # Without lists, as in a fresh container, the first try fails at once.
        for command in (install, ["apt-get", "update"], install):
            done = subprocess.run(
                ["timeout", "-k", "10", str(INSTALL_SECONDS), *command],
                check=False,
                capture_output=True,
                text=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
            )
            if done.returncode == 0 and command is install:
                return
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    raise MissingError(f"apt-get could not install {packages}: {last}")


@contextmanager
def _no_services_started() -> Iterator[None]:
    """Keep apt from starting sshd, munge and SLURM on the machine itself."""
    if POLICY.exists():  # images for containers have one that says the same
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
