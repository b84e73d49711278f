"""What belongs to an environment, and how its paths become those of a copy."""

from __future__ import annotations

import importlib
import os
import re
import site
import sys
from collections.abc import Iterable, Mapping, MutableMapping

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_MAX_TEXT_BYTES = 1 << 20  # of a file whose paths are replaced
_NAMES_ITSELF = re.compile(
    r".*/(pyvenv\.cfg|bin/[^/]+|(site|dist)-packages/[^/]+\.pth)", re.DOTALL
)


def find_roots(data: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the roots of the environment, and those of data and torch's caches."""
    own = (sys.prefix, sys.base_prefix)
    caches = [os.environ.get(name, "") for name in _CACHES]
    # What is in /usr is of the node.
    environment = [it for it in own if not re.fullmatch("/|/usr|/usr/.*", it)]
    return roots_of(environment), roots_of([*data, *filter(os.path.isdir, caches)])


def roots_of(paths: Iterable[str]) -> dict[str, str]:
    """Return files and folders as they are named, and each by its real path, too."""
    real = {os.path.abspath(it): os.path.realpath(it) for it in paths}  # noqa: PTH100
    return real | {it: it for it in real.values()}


def names_itself(path: str, size: int) -> bool:
    """Whether a file of an environment may have paths of the environment in it."""
    return size <= _MAX_TEXT_BYTES and _NAMES_ITSELF.fullmatch(path) is not None


class Relocation:
    """Moves roots of an environment, and all below them, to their copies; data alone.

    What is below data may be a folder that the command writes, such as one of
    checkpoints: in a copy they would be lost.

    >>> move = Relocation({"/opt/env": "/tmp/c/opt/env"}, data={"/data": "/tmp/d/data"})
    >>> move("/opt/env/bin"), move("/opt/environment"), move("/data"), move("/data/out")
    ('/tmp/c/opt/env/bin', '/opt/environment', '/tmp/d/data', '/data/out')
    >>> move.word("--data-dir=/data/"), move.word("out=/data/out"), move.word("data")
    ('--data-dir=/tmp/d/data', 'out=/data/out', 'data')
    """

    def __init__(
        self, environment: Mapping[str, str], data: Mapping[str, str] | None = None
    ) -> None:
        self._environment, self._data = environment, data or {}

    def __call__(self, path: str) -> str:
        """Return the path in a copy; `path` itself if it is in none."""
        if "/" in path:  # else it may be a name
            moved = self._data.get(os.path.abspath(path))  # noqa: PTH100
            if moved is not None:
                return moved
        above = path
        while above not in self._environment and above.strip("/"):
            above = above.rpartition("/")[0]
        return self._environment.get(above, above) + path[len(above) :]

    def word(self, word: str) -> str:
        """Return a word of a command, ``PATH`` or ``key=PATH``, with its path moved."""
        moved = self(word)
        key, equals, value = word.partition("=")
        is_kept = moved == word and equals
        return key + equals + self.word(value) if is_kept else moved

    def file(self, path: str, text: bytes) -> bytes:
        """Return what a file that `names_itself` shall contain.

        Paths are moved in ``pyvenv.cfg``, in ``.pth`` files and in the first lines of
        scripts.
        """
        head = text
        if not path.endswith((".cfg", ".pth")):  # pip writes two lines for a long path
            head = b"\n".join(text.split(b"\n", 2)[: 2 * text.startswith(b"#!")])
        old = "|".join(map(re.escape, self._environment))
        pattern = rf"(?<![^\s\"'=:!])({old})(?=[/\s\"':]|$)"
        moved = re.sub(pattern, lambda it: self(it[1]), os.fsdecode(head))
        return os.fsencode(moved) + text[len(head) :]


def activate(move: Relocation, environ: MutableMapping[str, str]) -> None:
    """Let this process, and those that it starts, use the copies from now on.

    What is imported stays; what is imported later comes from a copy.
    """
    names = ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix")
    for name in (*names, "executable", "_base_executable"):
        setattr(sys, name, move(getattr(sys, name)))
    lists = [sys.path, site.PREFIXES]
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__path__")  # getattr may import
        lists += [path] if isinstance(path, list) else []
    for paths in {id(it): it for it in lists}.values():  # a module may have two names
        paths[:] = map(move, paths)
    # What Python has noted of the old paths: finders, and what multiprocessing starts.
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if "multiprocessing.spawn" in sys.modules:
        sys.modules["multiprocessing.spawn"].set_executable(sys.executable)
    for name, value in list(environ.items()):
        moved = ":".join(map(move, value.split(":")))
        if moved != value and name not in ("PWD", "OLDPWD"):
            environ[name] = moved
