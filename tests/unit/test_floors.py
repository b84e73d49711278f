"""The house stands: imports go down only, files stay short, docstrings are there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpitrain"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (
    {"__main__"},
    {"cli"},
    {"tools"},
    {"checkpoint"},
    {"record"},
    {"train"},
    {"data", "models"},
    {"stage"},
    {"launch"},
    {"schedulers"},
    {"backend"},
    {"watchdog"},
    {"config"},
    {"mpi", "plugins", "flags", "help"},
    {"settings"},
    {"torch_compat"},
    {"errors", "files", "console", "_version", ""},
)
"""From the roof down; a module may import from its own floor and from those below."""

MPI_USERS = {"mpi", "launch", "stage", "backend"}


def room(path: Path) -> str:
    """``data`` for ``mpitrain/data/sources.py``; empty for the package itself."""
    name = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "" if name == "__init__" else name


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "mpitrain":
                found += [f"mpitrain.{alias.name}" for alias in node.names]
            else:
                found.append(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down_only(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return  # names of all floors, imported when asked for
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "mpitrain" and not rest.startswith("__"):
            target = floor(rest.partition(".")[0])
            assert floor(room(path)) <= target, f"{path} imports {module}"


def test_no_packages_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        if path != PACKAGE / "__init__.py":
            names = [it.split(".") for it in imports(path)]
            rooms = {it[1] for it in names if it[0] == "mpitrain" and len(it) > 1}
            graph.setdefault(room(path), set()).update(rooms - {room(path)})
    assert not without_leaves(graph)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports of functions and of TYPE_CHECKING count, too."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
    }
    graph: dict[str, set[str]] = {}
    for path in FILES:
        if path == PACKAGE / "__init__.py":
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        graph[name] = {it for it in imports_with_names(path) if it in names} - {name}
    assert not without_leaves(graph)


def without_leaves(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Take away what imports nothing that is left, again and again: circles stay."""
    while leaves := {name for name, after in graph.items() if not after & set(graph)}:
        for name in leaves:
            del graph[name]
    return graph


def imports_with_names(path: Path) -> list[str]:
    """Imported modules; of ``from package import module`` the module."""
    found = imports(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module != "mpitrain":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_no_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert not {name: of for name, of in places.items() if len(of) > 1}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_the_start_speaks_mpi(path: Path) -> None:
    if room(path) not in MPI_USERS:
        assert not [m for m in imports(path) if m.startswith("mpi4py")]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_can_be_read_at_a_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import mpitrain", {"torch", "mpi4py", "numpy"}),
        ("import mpitrain.cli", {"torch", "mpi4py.MPI", "numpy"}),
        (
            "import sys, mpitrain.cli; mpitrain.cli.main(['--help'])",
            {"torch", "mpi4py.MPI", "numpy"},
        ),
        *(
            (
                f"import sys, mpitrain.cli; mpitrain.cli.main({words})",
                {"torch", "mpi4py.MPI", "numpy", "yaml", "matplotlib"},
            )
            for words in (
                ["--help-all"],
                ["check", "--help"],
                ["check"],
                ["stage", "--help"],
                ["hostfile", "--help"],
                ["hostfile", "--from", "hostfiles/pbs"],
                ["jobscript", "--help"],
                ["jobscript", "slurm"],
                ["jobscript", "pbs", "--", "--epochs", "3"],
                ["report", "--help"],
                ["report"],
                ["fetch", "--help"],
                ["watch", "--help"],
                ["watch", "nowhere"],
                ["fetch"],
            )
        ),
        (
            "import mpitrain.train.trainer, mpitrain.tools.train.run",
            {"torchvision", "mpi4py.MPI"},
        ),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(
    code: str, forbidden: set[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not forbidden & set(done.stdout.splitlines()[-1].split())


def test_every_public_name_is_importable_and_described() -> None:
    import mpitrain

    for name in mpitrain.__all__:
        assert getattr(mpitrain, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        mpitrain.nothing  # noqa: B018
