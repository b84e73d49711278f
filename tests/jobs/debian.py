"""Install Debian's packages that a test needs, where this may be done."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INSTALL_SECONDS = 400
LOCK = Path(tempfile.gettempdir(), "mpitrain-tests-apt.lock")
POLICY = Path("/usr/sbin/policy-rc.d")


def install(*packages: str) -> str:
    """Install packages by apt; tests that run beside each other do so by turns.

    Returns:
        What went wrong; empty where nothing did.
    """
    if shutil.which("apt-get") is None:
        return f"no apt-get here to install {', '.join(packages)}"
    if os.geteuid() != 0:
        return f"only root may install {', '.join(packages)}"
    wanted = ["install", "-y", "--no-install-recommends", *packages]
    with _alone(), _no_services_started():
        # Without lists, as in a fresh container, the first try fails at once.
        for words in (wanted, ["update"], wanted):
            done = subprocess.run(
                ["timeout", "-k", "10", str(INSTALL_SECONDS), "apt-get", *words],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            if done.returncode == 0 and words is wanted:
                return ""
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return f"apt-get could not install {', '.join(packages)}: {last}"


@contextmanager
def _alone() -> Iterator[None]:
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
