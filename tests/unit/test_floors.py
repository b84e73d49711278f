"""The house stands: imports go down only, files stay short, docstrings are there."""

from __future__ import annotations

import ast
import re
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
    {"tasks"},
    {"data", "models"},
    {"stage"},
    {"warm"},
    {"launch"},
    {"schedulers"},
    {"backend"},
    {"watchdog"},
    {"config"},
    {"mpi", "plugins", "flags", "help"},
    {"settings"},
    {"torch_compat"},
    {"errors", "files", "console", "exact_sum", "_version", ""},
)
"""From the roof down; a module may import from its own floor and from those below."""

MPI_USERS = {"mpi", "launch", "stage", "backend"}


def room(path: Path) -> str:
    """``data`` for ``mpitrain/data/loader.py``; empty for the package itself."""
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


def test_only_the_strategies_know_bitwise() -> None:
    """Of the rooms that run a training; the others know it as a flag."""
    for name in ("train", "tasks", "data"):
        for path in (PACKAGE / name).rglob("*.py"):
            if PACKAGE / "train/strategy" not in path.parents:
                assert "bitwise" not in path.read_text().lower(), path


OF_IMAGES = re.compile(r"image|label|num_classes|pixel|mixup|cutmix|normaliz")


def test_the_loop_knows_no_images_and_no_labels() -> None:
    """Names of the code, not words of messages; `Trainer` has a short form for them."""
    for path in (*(PACKAGE / "train").rglob("*.py"), *(PACKAGE / "data").glob("*.py")):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in names_of(node)
            if OF_IMAGES.search(name.lower())
        }
        if path.name == "trainer.py":
            names -= {
                *("ImageClassification", "num_classes"),
                "mpitrain.tasks.image_classification.task",
                "mpitrain.tasks.image_classification.transforms",  # Statistics
            }
        names -= {"on_images", "log_images", "images"}  # what a user sends to loggers
        if path.name == "custom.py":
            names -= {"num_classes"}  # a data set's own word
        assert not names, path


def names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.arg | ast.keyword):
        return [node.arg or ""]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(alias.name for alias in node.names)]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return []


def test_no_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert not {name: of for name, of in places.items() if len(of) > 1}


MODULE_STATE = {
    "mpitrain.mpi.collectives.MPI_PROCESS",
    "mpitrain.launch.job.Job.current",
    "mpitrain.launch.import_torch.WITH_TORCH",
    "mpitrain.backend.backend._alive",
}
"""All of the package's; other state belongs to `Job` or to what it owns. The reason of
each stands at its line."""

MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "add", "discard"),
    *("update", "setdefault", "popitem", "appendleft", "popleft"),
}


def module_state() -> set[str]:
    """Find what functions change beyond themselves and their objects.

    Names that they bind by `global`, module-level containers, module-level objects of
    classes that are not frozen, and attributes of classes.
    """
    trees = {dotted(path): ast.parse(path.read_text()) for path in FILES}
    classes = {
        node.name: f"{module}.{node.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and not any("frozen" in ast.unparse(it) for it in node.decorator_list)
        and not any(ast.unparse(it) == "NamedTuple" for it in node.bases)
    }
    found = set()
    for module, tree in trees.items():
        homes = {}  # of the names of this module, and of those that it imports
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    homes[alias.asname or alias.name] = statement.module
            for name in bound_by(statement):
                homes[name] = module
                made = getattr(statement, "value", None)
                if isinstance(made, ast.Call) and ast.unparse(made.func) in classes:
                    found.add(f"{module}.{name}")
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = [it for node in ast.walk(function) for it in bound_by(node)]
            own = {*names, *(it.arg for it in function.args.args)}
            for node in ast.walk(function):
                if isinstance(node, ast.Global):
                    found |= {f"{module}.{name}" for name in node.names}
                for name, attribute in changed_by(node):
                    if attribute and name in classes:
                        found.add(f"{classes[name]}.{attribute}")
                    elif not attribute and name in homes and name not in own:
                        found.add(f"{homes[name]}.{name}")
    return {name for name in found if name.startswith("mpitrain")}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def bound_by(node: ast.AST) -> list[str]:
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return [it.id for it in targets if isinstance(it, ast.Name)]


def changed_by(node: ast.AST) -> list[tuple[str, str]]:
    """Return the names, and their attributes, that a node changes without binding."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of = node.func.value
        is_change = node.func.attr in MUTATORS and isinstance(of, ast.Name)
        return [(of.id, "")] if is_change and isinstance(of, ast.Name) else []
    found = []
    if isinstance(node, ast.Assign | ast.Delete | ast.AugAssign | ast.AnnAssign):
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            of = getattr(target, "value", None)
            if isinstance(target, ast.Subscript) and isinstance(of, ast.Name):
                found.append((of.id, ""))
            elif isinstance(target, ast.Attribute) and isinstance(of, ast.Name):
                found.append((of.id, target.attr))
    return found


def test_state_belongs_to_the_job() -> None:
    assert module_state() <= MODULE_STATE


PRIVATE_OF_PYTHON = {
    "os",
    "sys",
    "threading",
    "atexit",
    "runpy",
    "c",
}  # c: ctypes' libc
PRIVATE_OF_OTHERS = {"begun._trial_id", "self._run.settings._offline"}  # Optuna, W&B


def private_names_of_others(path: Path) -> set[str]:
    tree, found = ast.parse(path.read_text()), []
    functions = [it for it in ast.walk(tree) if isinstance(it, ast.FunctionDef)]
    methods = {it.name for it in functions}
    own = methods | {
        it.attr
        for it in ast.walk(tree)
        if isinstance(it, ast.Attribute) and ast.unparse(it.value) in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node.value).partition(".")[0]
            if root not in PRIVATE_OF_PYTHON and node.attr not in own:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "torch"
        ):
            words = [*str(node.module).split("."), *(it.name for it in node.names)]
            found += [f"{node.module}: {it}" for it in words if is_private(it)]
    return {f"{path}: {name}" for name in found if name not in PRIVATE_OF_OTHERS}


def test_private_names_of_torch_and_torchmetrics_are_used_in_one_module_each() -> None:
    compat = ("torch_compat.py", "metric_states.py")  # the latter: of torchmetrics
    files = [path for path in FILES if path.name not in compat]
    assert not set().union(*map(private_names_of_others, files))


def is_private(name: str) -> bool:
    is_public = name in {"_asdict", "_fields", "_replace"}  # of named tuples
    is_special = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not is_public and not is_special


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
