"""What belongs to an environment, and how its paths become those of a copy."""

from __future__ import annotations

import importlib
import os
import re
import site
import sys
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import NamedTuple

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
MAX_TEXT_BYTES = 1 << 20  # of a file whose paths are replaced
# Files of a copy that may name its own folder: below `<number>/<name of the root>/`.
NAMES_ITSELF = re.compile(
    r"\d+/[^/]+/(pyvenv\.cfg|bin/[^/]+|lib\d*/[^/]+/(site|dist)-packages/[^/]+\.pth)"
)


class Root(NamedTuple):
    """A file or folder that is staged with all that is below."""

    path: str
    real_path: str  # without symbolic links


def find_roots(data: Iterable[str]) -> tuple[list[Root], list[Root]]:
    """Return the environment, and `data` with the caches of torch's compilers."""
    own = (sys.prefix, sys.base_prefix)
    # What is in /usr is of the node.
    own_roots = roots_of(it for it in own if not re.fullmatch("/|/usr|/usr/.*", it))
    caches = [os.environ.get(name, "") for name in _CACHES]
    return own_roots, roots_of([*data, *filter(os.path.isdir, caches)])


def roots_of(paths: Iterable[str]) -> list[Root]:
    """Return roots, each once."""
    found = [Root(os.path.abspath(it), os.path.realpath(it)) for it in paths]  # noqa: PTH100
    return list({root.real_path: root for root in reversed(found)}.values())[::-1]


def pairs_of(roots: Iterable[Root], folder: str) -> list[tuple[str, str]]:
    """Return old and new paths of roots whose copies are in `folder`."""
    new = [f"{folder}/{num}/{Path(it.path).name}" for num, it in enumerate(roots)]
    return [(old, to) for both, to in zip(roots, new, strict=True) for old in both]


class Relocation:
    """Replaces paths of roots by those of their copies.

    >>> move = Relocation([("/opt/env", "/tmp/copy/0/env")])
    >>> move("/opt/env/bin"), move("/opt/environment")
    ('/tmp/copy/0/env/bin', '/opt/environment')
    >>> move.word("--data-dir=/opt/env/data"), move.word("x/opt/env")
    ('--data-dir=/tmp/copy/0/env/data', 'x/opt/env')
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))  # inner roots first
        self._new = dict(reversed(self._pairs))
        old = "|".join(re.escape(path) for path, _ in self._pairs) or "(?!)"
        self._pattern = re.compile(rf"(?<![^\s\"'=:!])({old})(?=[/\s\"':]|$)")

    def __call__(self, path: str) -> str:
        """Return the path in a copy; `path` itself if it is in none."""
        for old, new in self._pairs:
            if path == old or path.startswith(f"{old}/"):
                return new + path[len(old) :]
        return path

    def word(self, word: str) -> str:
        """Return a word of a command, ``PATH`` or ``--flag=PATH``, with paths moved.

        A word without a slash may be a name.
        """
        flag, equals, value = word.partition("=")
        if equals and flag.startswith("-"):
            return flag + equals + self.word(value)
        path = os.path.normpath(word)
        moved = self(path) if "/" in word else path
        return word if moved == path else moved

    def file(self, path: str, text: bytes) -> bytes:
        """Return what a file of `NAMES_ITSELF` shall contain.

        Paths of roots are replaced in ``pyvenv.cfg``, in ``.pth`` files and in the
        first lines of scripts.
        """
        head = text
        if not path.endswith((".cfg", ".pth")):  # pip writes two lines for a long path
            head = b"\n".join(text.split(b"\n", 2)[: 2 * text.startswith(b"#!")])
        moved = self._pattern.sub(lambda old: self._new[old[1]], os.fsdecode(head))
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
        found = getattr(module, "__dict__", {})  # some import when asked for more
        locations = getattr(found.get("__spec__"), "submodule_search_locations", None)
        lists += [
            it for it in (found.get("__path__"), locations) if isinstance(it, list)
        ]
    for paths in {id(it): it for it in lists}.values():  # two may be one
        paths[:] = map(move, paths)
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if "multiprocessing.spawn" in sys.modules:
        sys.modules["multiprocessing.spawn"].set_executable(sys.executable)
    for name, value in list(environ.items()):
        moved = ":".join(map(move, value.split(":")))
        if moved != value and name not in ("PWD", "OLDPWD"):
            environ[name] = moved
