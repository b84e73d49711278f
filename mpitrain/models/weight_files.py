"""Files and folders of weights, read without running code that they hold.

    .pt .pth .bin .ckpt .tar     what `torch.save` wrote, mapped into memory
    .safetensors                 read tensor by tensor
    .index.json                  several of either, as Transformers writes them
    a folder                     one of these, or of torch.distributed.checkpoint

Weights that stay in their file are `StoredWeight` s: a model larger than the memory
that is left can be filled with them one by one.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpitrain.errors import DataError, UsageError
from mpitrain.plugins import require

SUFFIXES = frozenset({".pt", ".pth", ".safetensors", ".bin", ".ckpt", ".tar", ".json"})
# Keys under which programs save a ``state_dict``, in any case (`MODEL_STATE`); averages
# first, as in timm.
AVERAGES = ("state_dict_ema", "model_ema", "params_ema")
STATE_KEYS = (
    *(*AVERAGES, "model", "state_dict", "model_state_dict", "model_state"),
    *("module", "net", "network", "weights", "state", "params", "teacher", "app"),
)
EXPECTED = "expected a state_dict: torch.save(model.state_dict(), 'model.pt')"

IN_FOLDER = (
    *("*.safetensors.index.json", "*.bin.index.json"),
    *("model.safetensors", "pytorch_model.bin", "*.safetensors", "pytorch_model*.bin"),
)
"""What is read of a folder, the first that is there: Transformers', timm's."""

LFS_POINTER = b"version https://git-lfs"

DCP_METADATA = ".metadata"  # of torch.distributed.checkpoint, a pickle

# What training scripts save beside the weights: timm's, torchvision's, Lightning's.
BESIDE = (
    *("argparse.Namespace", "types.SimpleNamespace", "numpy.dtype", "numpy.ndarray"),
    *("numpy.core.multiarray.scalar", "numpy.core.multiarray._reconstruct"),
    *("numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),  # since Python 3.13
    *("pathlib.WindowsPath", "pathlib._local.WindowsPath"),
    *(f"builtins.{name}" for name in ("dict", "float", "int", "list", "str")),
)

_DCP = "torch.distributed.checkpoint"
DCP_CLASSES = {
    "torch.Size",
    "torch.serialization._get_layout",
    f"{_DCP}.filesystem._StorageInfo",
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "MetadataIndex"),
            *("StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    ),
}
"""What `DCP_METADATA` is made of: none of them does anything."""


class StoredWeight(NamedTuple):
    """A weight in a file, which is read anew by each call."""

    shape: torch.Size
    read: Callable[[], Tensor]


# By name; a few values may be no weights (`_extra_state`).
State = dict[str, Any]


def is_file_name(weights: str) -> bool:
    """Whether ``--weights`` can only name a file, not weights that a library knows."""
    return Path(weights).suffix in SUFFIXES or "/" in weights


class Ignored:
    """Stands for an object of `BESIDE`: nothing of its module is called."""

    def __new__(cls, *_: object) -> Ignored:
        """Drop the arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


def read_state(path: Path) -> tuple[State, str]:
    """Open the weights in a file or folder, see the module; onto the CPU.

    Returns:
        The weights, and of the keys `AVERAGES` the one under which they were found.
    """
    return _find_state(read_content(path), path)


def read_content(path: Path) -> Any:
    """Open a file or folder of weights; return all that is in it, nested as there."""
    if (path / DCP_METADATA).is_file():
        return _read_dcp(path)
    files = _files_of(path)
    if len(files) == 1:
        return _read_file(files[0])
    state: State = {}
    for file in files:
        found, _ = _find_state(_read_file(file), file)
        if twice := state.keys() & found.keys():
            raise DataError(
                f"--weights {path} has {min(twice)} in two files, one of them "
                f"{file.name}; expected each weight once, or the name of a file"
            )
        state |= found
    return state


def _files_of(path: Path) -> list[Path]:
    """Return the files of a folder or index, or the file."""
    if path.is_dir():
        of_patterns = (sorted(path.glob(pattern)) for pattern in IN_FOLDER)
        found = next(filter(None, of_patterns), [])
        if found and found[0].suffix != ".json":
            return found
        path = found[0] if found else path
    if not path.is_file():
        is_away = f"is not there, seen from {Path.cwd()}"
        found_words = "is a folder without weights" if path.is_dir() else is_away
        raise UsageError(
            f"--weights {str(path)!r} {found_words}; expected a file of weights, such "
            "as runs/NAME/model.pt, or a folder of Transformers, timm or "
            "torch.distributed.checkpoint"
        )
    if path.suffix != ".json":
        return [path]
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
        return [path.with_name(name) for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"--weights {path} is no index of weights ({type(error).__name__}: "
            f"{error}); expected one with a weight_map, such as "
            "model.safetensors.index.json"
        ) from None


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise DataError(
            f"--weights: {path} is missing, which the index beside it names.\nCopy or "
            "download it again."
        )
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        names: list[Any] = [(Ignored, name) for name in BESIDE]
        # torch fills no other kind of mapping with items.
        names.append((lambda *_: OrderedDict(), "collections.defaultdict"))
        with warnings.catch_warnings(), torch.serialization.safe_globals(names):
            warnings.simplefilter("ignore")  # about pickles by other means than torch's
            is_mapped = zipfile.is_zipfile(path)  # not as torch wrote it before 1.6
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=is_mapped
            )
    except UsageError:  # of `require`
        raise
    except Exception as error:  # a broken file can fail in any way
        if "TorchScript" in str(error):
            raise DataError(
                f"--weights {path} is a TorchScript program; {EXPECTED}, with "
                f"model = torch.jit.load({str(path)!r})"
            ) from None
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise DataError(
                    f"--weights {path} is a pointer of Git LFS, not the file itself; "
                    "expected: git lfs pull"
                ) from None
        # In torch 2.15: "Unsupported global: GLOBAL posix.system was not ...".
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise DataError(
            f"--weights {path} holds more than weights, and was not opened: it wants "
            f"{code[1]} of Python, which could run anything; {EXPECTED}, where the "
            "file comes from"
            if code
            else f"--weights {path} cannot be read ({type(error).__name__}: {reason}): "
            f"it has {path.stat().st_size:,} bytes, and is not a file of weights, or "
            "not the whole of one.\nCopy or download it again."
        ) from error


def _read_safetensors(path: Path) -> State:
    require("safetensors", f"--weights {path}")
    open_file = importlib.import_module("safetensors").safe_open

    def read(name: str) -> Tensor:
        # Opened for each: what is mapped is given back with the tensor.
        with open_file(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    with open_file(path, "pt") as file:
        return {
            name: StoredWeight(
                torch.Size(file.get_slice(name).get_shape()),
                functools.partial(read, name),
            )
            for name in file.keys()  # noqa: SIM118 - it is no dict
        }


def _read_dcp(path: Path) -> dict[Any, Any]:
    """Return what a folder of torch.distributed.checkpoint has, nested as it was."""
    dcp: Any = importlib.import_module(_DCP)
    kind = importlib.import_module(f"{_DCP}.metadata").TensorStorageMetadata
    metadata = _dcp_metadata(path)

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        """Unpickles nothing: torch's own reads the metadata by `pickle.load`."""

        def read_metadata(self, *_: object, **__: object) -> Any:
            return metadata

    class Planner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        """Unpickles nothing: torch's own reads what is bytes by `pickle.load`."""

        def load_bytes(self, *_: object) -> None:
            raise pickle.UnpicklingError("a pickle in place of a weight")

    def read(name: str) -> Tensor:
        of, reader = metadata.state_dict_metadata[name], Reader(path)
        tensor = torch.empty(of.size, dtype=of.properties.dtype)
        try:
            dcp.load(
                {name: tensor}, storage_reader=reader, planner=Planner(), no_dist=True
            )
        except dcp.CheckpointException as error:  # no Exception
            reason = error.failures[0][0]
            raise DataError(
                f"--weights {path}: {name} cannot be read ({type(reason).__name__}: "
                f"{str(reason).partition(chr(10))[0]}).\nCopy or download it again."
            ) from None
        return tensor

    content: dict[Any, Any] = {}
    paths = metadata.planner_data or {}
    for name, of in metadata.state_dict_metadata.items():
        *above, last = paths.get(name, (name,))
        inner = content
        for key in above:
            inner = inner.setdefault(key, {})
        if isinstance(of, kind):  # else bytes, which are pickles
            inner[last] = StoredWeight(of.size, functools.partial(read, name))
    return content


def _dcp_metadata(path: Path) -> Any:
    file = path / DCP_METADATA

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            is_dtype = module == "torch" and isinstance(
                getattr(torch, name, None), torch.dtype
            )
            if full in DCP_CLASSES or is_dtype:
                return super().find_class(module, name)
            if full in BESIDE:
                return Ignored
            raise DataError(
                f"--weights {path} holds more than weights, and was not opened: "
                f"{file.name} wants {full} of Python, which could run anything; "
                "expected what torch.distributed.checkpoint.save writes"
            )

    try:
        return Unpickler(io.BytesIO(file.read_bytes())).load()
    except DataError:  # of `find_class`
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise DataError(
            f"--weights: {file} cannot be read ({type(error).__name__}: {error}).\n"
            "Copy or download it again."
        ) from error


def _find_state(content: object, path: Path) -> tuple[State, str]:
    if found := _search(content):
        return found
    while isinstance(content, Mapping) and (inner := _under_known_keys(content)):
        content = inner[0][1]  # as deep as there are names to show
    kind, wants = type(content).__name__, EXPECTED
    if isinstance(content, Mapping):
        kind += f" with {', '.join(list(map(str, content))[:10]) or 'nothing'}"
        if any(isinstance(value, Ignored) for value in content.values()):
            kind += ", whose values are NumPy arrays or other objects"
            wants = "expected tensors: torch.from_numpy(array) for each"
    raise DataError(
        f"--weights {path} holds no weights: found a {kind}; {wants}, or it under "
        f"one of the keys {', '.join(STATE_KEYS)}"
    )


def _search(content: object) -> tuple[State, str] | None:
    if not isinstance(content, Mapping):
        return None
    for key, inner in _under_known_keys(content):
        # Once more: torch.distributed.checkpoint's users save app/model.
        if found := _search(inner):
            return found[0], key if key in AVERAGES else found[1]
    state = {str(key): value for key, value in content.items()}
    is_state = any(isinstance(it, Tensor | StoredWeight) for it in state.values())
    return (state, "") if is_state else None


def _under_known_keys(content: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    by_key = {str(key).lower(): value for key, value in content.items()}
    known = [(key, by_key.get(key)) for key in STATE_KEYS]
    return [(key, value) for key, value in known if isinstance(value, Mapping)]
