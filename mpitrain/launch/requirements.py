"""Minimum versions, by metadata: checked before torch is imported."""

from __future__ import annotations

import contextlib
import re
import sys
from importlib import metadata

from mpitrain.errors import LaunchError, agreed


def check_requirements() -> None:
    """Refuse packages older than the minimum that mpitrain was installed with.

    Local. After the ranks' versions were compared: all raise, or none.

    Raises:
        LaunchError: With each package, its version and the minimum.
    """
    old = old_packages()
    if old:
        found = "\n".join(
            f"  {name}: found {version}, expected {minimum} or newer"
            for name, version, minimum in old
        )
        raise agreed(
            LaunchError(
                f"packages of {sys.prefix} are too old for mpitrain.\n{found}\n"
                f"Type: {upgrade_command(old)}"
            )
        )


def old_packages() -> list[tuple[str, str, str]]:
    """Return name, version and minimum of each installed package that is too old.

    The minimum versions are those of mpitrain's own metadata. Where it is not
    installed, such as on a PYTHONPATH, there are none.
    """
    try:
        required = metadata.requires("mpitrain") or []
    except metadata.PackageNotFoundError:
        return []
    old = []
    for line in required:
        # Not those of extras, which have a marker after a semicolon.
        if found := re.fullmatch(r"([\w.-]+)\s*>=\s*([\d.]+)", line):
            name, minimum = found.groups()
            with contextlib.suppress(metadata.PackageNotFoundError):
                version = metadata.version(name)
                if numbers(version) < numbers(minimum):
                    old.append((name, version, minimum))
    return old


def upgrade_command(old: list[tuple[str, str, str]]) -> str:
    """Return the command that upgrades some packages of this environment."""
    words = " ".join(f"'{name}>={minimum}'" for name, _, minimum in old)
    return f"{sys.executable} -m pip install --upgrade {words}"


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with.

    >>> numbers("2.15.0+cu132"), numbers("5.0.11rc1")
    ((2, 15, 0), (5, 0, 11))
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
