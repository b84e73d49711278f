"""Weights: files of them, read without unpickling code, and loaded into a model."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models.layers import adapt_filters, first_conv, head_of
from mpitrain.plugins import require

SUFFIXES = frozenset({".pt", ".pth", ".safetensors", ".bin", ".ckpt", ".tar"})
# Keys under which programs save a ``state_dict``, in any case (`MODEL_STATE`); averages
# first, as in timm.
AVERAGES = ("state_dict_ema", "model_ema", "params_ema")
STATE_KEYS = (
    *(*AVERAGES, "model", "state_dict", "model_state_dict", "model_state"),
    *("module", "net", "network", "weights", "state", "params", "teacher"),
)
WRAPPERS = ("module.", "model.", "backbone.")  # that programs put before the names
EXPECTED = "expected a state_dict: torch.save(model.state_dict(), 'model.pt')"

# What training scripts save beside the weights: timm's, torchvision's, Lightning's.
BESIDE = (
    *("argparse.Namespace", "types.SimpleNamespace", "numpy.dtype", "numpy.ndarray"),
    *("numpy.core.multiarray.scalar", "numpy.core.multiarray._reconstruct"),
    *("numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),  # since Python 3.13
    *("pathlib.WindowsPath", "pathlib._local.WindowsPath"),
    *(f"builtins.{name}" for name in ("dict", "float", "int", "list", "str")),
)

State = dict[str, Any]  # weights by name; a few may be no tensors (`_extra_state`)


def is_file_name(weights: str) -> bool:
    """Whether ``--weights`` names a file, and not weights that a library knows."""
    path = Path(weights)
    return path.suffix in SUFFIXES or "/" in weights or path.is_file()


class Ignored:
    """Stands for an object of `BESIDE`: nothing of its module is called."""

    def __new__(cls, *_: object) -> Ignored:
        """Drop the arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


def read_state(path: Path) -> tuple[State, str]:
    """Read the weights in a file of ``torch.save`` or .safetensors, onto the CPU.

    Returns:
        The weights, and of the keys `AVERAGES` the one under which they were found.
    """
    if not path.is_file():
        is_away = f"is not there, seen from {Path.cwd()}"
        found = "is a folder" if path.is_dir() else is_away
        raise UsageError(
            f"--weights {str(path)!r} {found}; expected a file of weights, such as "
            "runs/NAME/model.pt"
        )
    try:
        if path.suffix == ".safetensors":
            require("safetensors", f"--weights {path}")
            safetensors = importlib.import_module("safetensors.torch")
            return dict(safetensors.load_file(path, device="cpu")), ""
        names: list[Any] = [(Ignored, name) for name in BESIDE]
        # torch fills no other kind of mapping with items.
        names.append((lambda *_: OrderedDict(), "collections.defaultdict"))
        with warnings.catch_warnings(), torch.serialization.safe_globals(names):
            warnings.simplefilter("ignore")  # about pickles by other means than torch's
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:  # a broken file can fail in any way
        if "TorchScript" in str(error):
            raise DataError(
                f"--weights {path} is a TorchScript program; {EXPECTED}, with "
                f"model = torch.jit.load({str(path)!r})"
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
    return _find_state(content, path)


def _find_state(content: object, path: Path) -> tuple[State, str]:
    kind = type(content).__name__
    if isinstance(content, Mapping):
        by_key = {str(key).lower(): value for key, value in content.items()}
        for key in STATE_KEYS:
            if isinstance(by_key.get(key), Mapping):
                state, average = _find_state(by_key[key], path)
                return state, key if key in AVERAGES else average
        state = {str(key): value for key, value in content.items()}
        if any(isinstance(value, Tensor) for value in state.values()):
            return state, ""
        kind += f" with {', '.join(list(state)[:10]) or 'nothing'}"
    raise DataError(
        f"--weights {path} holds no weights: found a {kind}; {EXPECTED}, or it under "
        f"one of the keys {', '.join(STATE_KEYS)}"
    )


def cached_file(url: str, *, local: bool = True, progress: bool = False) -> str:
    """Return a file in torch's cache, downloaded unless `local`; empty: not there."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not local and not path.exists():  # resnet18-f37072fd.pth: has its SHA-256
        digest = re.search(r"-([0-9a-f]{8,})\.", path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), digest and digest[1], progress)
    return str(path) if path.exists() else ""


def unknown_weights(name: str, weights: str, known: Sequence[str] = ()) -> UsageError:
    """Make the error for weights that are no file, nor known to a model's library."""
    expected = f", or for --model {name} one of {', '.join(known)}" if known else ""
    return UsageError(
        f"--weights {weights!r}: no such file, and --model {name} has no weights of "
        f"that name; expected a file, such as runs/NAME/model.pt{expected}"
    )


def not_downloaded(name: str, weights: str | None, error: Exception) -> DataError:
    """Make the error for a model or weights that could not be downloaded."""
    what = f"{name} --weights {weights}" if weights else name
    reason = str(error).strip().partition("\n")[0]
    return DataError(
        f"--model {what} could not be downloaded ({type(error).__name__}: {reason}).\n"
        f"Fetch it where there is internet: python -m mpitrain fetch {what}\n"
        "This machine must see the same cache: TORCH_HOME, for timm HF_HOME."
    )


def load_state(model: nn.Module, state: State, source: str) -> str:
    """Load weights by name into a model, in place; return what changed, for the user.

    The weights of another architecture are an error, which leaves the model unchanged.
    """
    target = model.state_dict()  # loaded as a whole, with its version metadata
    state, prefix = _without_wrappers(state, target)
    state = _translate(model, state, source)
    try:
        head = head_of(model)[0] + "."
    except DataError:
        head = "(no head)"
    conv = first_conv(model)
    first = f"{conv[0]}.weight" if conv and conv[1].groups == 1 else "(no filters)"
    fitting: State = {}
    changes: dict[str, str] = {}
    wrong: list[str] = []
    for name, value in state.items():
        mine = target.get(name)
        if not isinstance(mine, Tensor) or getattr(value, "shape", ()) == mine.shape:
            fitting[name] = value
        elif not isinstance(value, Tensor):
            wrong.append(f"{name} is a {type(value).__name__}")
        elif name.startswith(head) and value.shape[1:] == mine.shape[1:]:
            classes = f"{mine.shape[0]} classes instead of {value.shape[0]}"
            changes[head] = f"{head[:-1]} new ({classes})"
        elif name == first and value.shape[:1] + value.shape[2:] == (
            mine.shape[:1] + mine.shape[2:]
        ):
            fitting[name] = adapt_filters(value, mine.shape[1])
            changes[name] = f"{name} from {value.shape[1]} channels to {mine.shape[1]}"
        else:
            wrong.append(f"{name} {tuple(value.shape)}, expected {tuple(mine.shape)}")
    if head in changes:
        fitting = {k: v for k, v in fitting.items() if not k.startswith(head)}
    unused = [name for name in fitting if name not in target]
    wanted = (name for name in target if not name.endswith(".num_batches_tracked"))
    missing = [name for name in wanted if name not in state]
    # Whole parts that the model lacks (a decoder, a second head) are left out; further
    # layers in a part that it has are the sign of another architecture.
    parts = {_part(name) for name in target}
    further = [n for n in unused if _part(n) in parts and not n.startswith(head)]
    errors = (
        ("missing", [name for name in missing if not name.startswith(head)]),
        ("of another shape", wrong),
        ("that have no place in it", further),
    )
    if any(names for _, names in errors):
        found = (f"{len(names)} {w} ({_some(names)})" for w, names in errors if names)
        raise DataError(
            f"the weights from {source} are not those of this {type(model).__name__}: "
            f"{'; '.join(found)}.\nExpected the same architecture; only the number of "
            "classes and the channels of the images may differ."
        )
    loaded = {name: value for name, value in fitting.items() if name in target}
    target.update(loaded)
    model.load_state_dict(target)
    words = [f"{len(loaded)} tensors", *changes.values()]
    if prefix:
        words.append(f"those whose names begin with {prefix}")
    if missing:
        words.append(f"new {_some(missing)}")
    if unused:
        words.append(f"{len(unused)} not used ({_some(unused)})")
    return "; ".join(words)


def _without_wrappers(state: State, known: Iterable[str]) -> tuple[State, str]:
    """Take off or add prefixes, so that most names are known; return one of others.

    Of `WRAPPERS`, and any that stands before the first name that is known, such as
    ``encoder_q.``, which is returned if it was taken off.
    """
    first, known = next(iter(known), ""), set(known)
    plain = {k.replace("_orig_mod.", ""): v for k, v in state.items()}
    spellings = [("", plain)]
    for _, spelling in spellings:  # grows: one wrapper may be inside another
        found = [w for w in WRAPPERS if any(name.startswith(w) for name in spelling)]
        spellings += [("", _without(spelling, wrapper)) for wrapper in found]
    end = first.removeprefix("backbone.")
    others = [k.removesuffix(end) for k in plain if k.endswith(f".{end}")]
    spellings += [(other, _without(plain, other)) for other in others]
    spellings += [(o, {f"backbone.{k}": v for k, v in s.items()}) for o, s in spellings]
    prefix, state = max(spellings, key=lambda it: len(known & it[1].keys()))
    return state, prefix


def _without(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items()}


def _translate(model: nn.Module, state: State, source: str) -> State:
    """Let the model's library convert older names and other image sizes."""
    kind, module = type(model).__name__, type(model).__module__
    library = module.partition(".")[0]
    try:
        if library == "timm":
            convert = getattr(sys.modules[module], "checkpoint_filter_fn", None)
            return dict(convert(dict(state), model)) if convert else state
        if library == "torchvision" and kind == "DenseNet":
            # The files have norm.1 for norm1, as in torchvision.models.densenet.
            old = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")
            return {old.sub(r"\1\2", name): value for name, value in state.items()}
        if library == "torchvision" and "encoder.pos_embedding" in state:
            vit = importlib.import_module("torchvision.models.vision_transformer")
            sizes = (model.image_size, model.patch_size)
            return dict(vit.interpolate_embeddings(*sizes, dict(state)))
    except Exception as error:
        raise DataError(
            f"the weights from {source} are not those of this {kind}: {library} could "
            f"not fit them ({type(error).__name__}: {error})"
        ) from error
    return state


def _part(name: str) -> str:
    backbone = "backbone." if name.startswith("backbone.") else ""
    return backbone + name.removeprefix(backbone).partition(".")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
