"""Weights that are loaded into a model, and where their files are."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models.layers import adapt_filters, first_conv, head_of
from mpitrain.models.weight_files import State, StoredWeight, read_state
from mpitrain.torch_compat import local_shard

logger = logging.getLogger("mpitrain")

# That torch.compile, FSDP1 and activation checkpoints put into the names.
INNER_WRAPPERS = (
    *("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."),
)
WRAPPERS = ("module.", "model.", "backbone.")  # that programs put before the names


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


def load_weights(model: nn.Module, path: str | Path) -> str:
    """Load weights from a file or folder into a model, in place, one by one; local.

    ``--weights`` says what a file or folder may be. Nothing in it is executed.

    Args:
        model: Plain, or sharded by `fully_shard`: each rank then reads its own shard.
        path: The file or folder, which this rank can read.

    Returns:
        A line for the user: how many tensors, and what is new or not used.

    Raises:
        UsageError: It is not there; the model is unchanged, as below.
        DataError: It cannot be read, or is of another architecture; or the model is
            still on the device ``meta``.
    """
    state, _ = read_state(Path(path))
    return load_state(model, state, str(path))


def load_state(model: nn.Module, state: State, source: str) -> str:
    """Load weights by name into a model, in place; return what changed, for the user.

    The weights of another architecture are an error, which leaves the model unchanged.
    """
    target = model.state_dict()  # loaded as a whole, with its version metadata
    if any(isinstance(it, Tensor) and it.is_meta for it in target.values()):
        raise DataError(
            f"weights from {source}: the model is on the device meta, found no memory "
            "for them; expected mpitrain.load_weights(trainer.model, path) in a "
            "callback's `setup`, or a model on the cpu"
        )
    state, prefix = _without_wrappers(state, target)
    try:
        head = head_of(model)[0] + "."
    except DataError:
        head = "(no head)"
    state = _translate(model, state, target, source, head)
    conv = first_conv(model)
    first = f"{conv[0]}.weight" if conv and conv[1].groups == 1 else "(no filters)"
    fitting: State = {}
    changes: dict[str, str] = {}
    wrong: list[str] = []
    for name, value in state.items():
        mine = target.get(name)
        if not isinstance(mine, Tensor) or getattr(value, "shape", ()) == mine.shape:
            fitting[name] = value
        elif not isinstance(value, Tensor | StoredWeight):
            wrong.append(f"{name} is a {type(value).__name__}")
        elif name.startswith(head) and value.shape[1:] == mine.shape[1:]:
            classes = f"{mine.shape[0]} classes instead of {value.shape[0]}"
            changes[head] = f"{head[:-1]} new ({classes})"
        elif name == first and value.shape[:1] + value.shape[2:] == (
            mine.shape[:1] + mine.shape[2:]
        ):
            fitting[name] = adapt_filters(_read(value), mine.shape[1])
            changes[name] = f"{name} from {value.shape[1]} channels to {mine.shape[1]}"
        else:
            wrong.append(f"{name} {tuple(value.shape)}, expected {tuple(mine.shape)}")
    if head in changes:
        fitting = {k: v for k, v in fitting.items() if not k.startswith(head)}
    unused = [name for name in fitting if name not in target]
    # Of tied weights a file may have one name.
    of_names = model.named_parameters(remove_duplicate=False)
    owners = {name: id(weight) for name, weight in of_names}
    there = {owners.get(name) for name in fitting}
    missing = [
        name
        for name in target
        if name not in state
        # Files from before version 2 of torch's batch norm lack it.
        and not name.endswith(".num_batches_tracked")
        and (name not in owners or owners[name] not in there)
    ]
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
    broken, speaks = "", not dist.is_initialized() or dist.get_rank() == 0
    for name, value in loaded.items():
        if isinstance(target[name], Tensor):
            whole = _read(value)
            if speaks and not broken and _has_nan(whole):
                broken = name
            _fill(target[name], whole)
        else:
            target[name] = value
    model.load_state_dict(target)  # what is not filled yet, such as copies
    if broken:
        logger.warning("weights from %s: %s has NaN; expected numbers", source, broken)
    words = [f"{len(loaded)} tensors", *changes.values()]
    if prefix:
        words.append(f"those whose names begin with {prefix}")
    if missing:
        words.append(f"new {_some(missing)}")
    if unused:
        words.append(f"{len(unused)} not used ({_some(unused)})")
    return "; ".join(words)


@torch.no_grad()
def _fill(target: Tensor, source: Tensor) -> None:
    """Copy a weight into a tensor of its shape; of a sharded one, into the shard."""
    if (found := local_shard(target)) is not None:
        target, shard = found
        for dim, size in enumerate(shard.sizes):
            source = source.narrow(dim, shard.offsets[dim], size)
    target.copy_(source)


def _has_nan(value: Tensor) -> bool:
    """Whether a weight has a NaN, as a whole: a rank's shard may have none."""
    if value.itemsize == 1:
        return False  # types of 8 bits do not compute
    # First by a sum, which takes no memory; that of two infinities is a NaN, too.
    return bool(value.sum().isnan()) and bool(value.isnan().any())


def _read(value: Tensor | StoredWeight) -> Tensor:
    return value.read() if isinstance(value, StoredWeight) else value


def _without_wrappers(state: State, known: Iterable[str]) -> tuple[State, str]:
    """Take off or add prefixes, so that most names are known; return one of others.

    Of `WRAPPERS`, and any that stands before the first name that is known, such as
    ``encoder_q.``, which is returned if it was taken off.
    """
    first, known = next(iter(known), ""), set(known)
    inner = re.compile("|".join(map(re.escape, INNER_WRAPPERS)))
    plain = {inner.sub("", name): value for name, value in state.items()}
    spellings = [("", plain)]
    for _, spelling in spellings:  # grows: one wrapper may be inside another
        found = [w for w in WRAPPERS if any(name.startswith(w) for name in spelling)]
        spellings += [("", _without(spelling, wrapper)) for wrapper in found]
    end = first.removeprefix("backbone.")
    others = [k.removesuffix(end) for k in plain if k.endswith(f".{end}")]
    spellings += [(other, _without(plain, other)) for other in others]
    spellings += [(o, {f"backbone.{k}": v for k, v in s.items()}) for o, s in spellings]
    # Of equal ones the first: names as they are in the file.
    prefix, state = max(spellings, key=lambda it: len(known & it[1].keys()))
    return state, prefix


def _without(state: State, prefix: str) -> State:
    begin = (name for name in state if name.startswith(prefix))
    found = {name.removeprefix(prefix): state[name] for name in begin}
    for name, value in state.items():
        if not name.startswith(prefix):  # of two of one name it is the one not used
            found[f"(without {prefix}) {name}" if name in found else name] = value
    return found


def _translate(
    model: nn.Module, state: State, target: State, source: str, head: str
) -> State:
    """Let the model's library convert older names and other image sizes."""
    if target.keys() == state.keys() and all(
        getattr(state[name], "shape", ()) == getattr(it, "shape", ())
        for name, it in target.items()
    ):
        return state  # as they are, and not yet read
    # fully_shard puts a class of its own before the model's.
    kinds = [it for it in type(model).__mro__ if not it.__name__.startswith("FSDP")]
    kind, module = kinds[0].__name__, kinds[0].__module__
    library = module.partition(".")[0]
    try:
        if any(it.__name__ == "PreTrainedModel" for it in kinds):
            library = "transformers"
            of_rest = [name for name in target if not name.startswith(head)]
            if target.keys() >= state.keys() or all(it in state for it in of_rest):
                return state
            return _of_transformers(kinds[0], model, state)
        if library == "timm":
            convert = getattr(sys.modules[module], "checkpoint_filter_fn", None)
            return dict(convert(_whole(state), model)) if convert else state
        if library == "torchvision" and kind == "DenseNet":
            # The files have norm.1 for norm1, as in torchvision.models.densenet.
            old = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")
            return {old.sub(r"\1\2", name): value for name, value in state.items()}
        if library == "torchvision" and "encoder.pos_embedding" in state:
            vit = importlib.import_module("torchvision.models.vision_transformer")
            sizes = (model.image_size, model.patch_size)
            return dict(vit.interpolate_embeddings(*sizes, _whole(state)))
    except Exception as error:
        raise DataError(
            f"the weights from {source} are not those of this {kind}: {library} could "
            f"not fit them ({type(error).__name__}: {error})"
        ) from error
    return state


def _of_transformers(kind: Any, model: Any, state: State) -> State:
    """Let `from_pretrained` rename and join weights as `save_pretrained` has them."""
    logs: Any = sys.modules["transformers.utils.logging"]
    verbosity, has_bar = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    whole = _whole(state)
    dtypes = [it.dtype for it in whole.values() if it.is_floating_point()]
    # Types of 8 bits have no promotion.
    if not dtypes or min(it.itemsize for it in dtypes) == 1:
        dtypes = [model.dtype]
    try:
        with torch.random.fork_rng(devices=[]):  # it draws what is missing
            built, info = kind.from_pretrained(
                None,
                config=copy.deepcopy(model.config),
                state_dict=whole,
                dtype=functools.reduce(torch.promote_types, dtypes),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    finally:
        logs.set_verbosity(verbosity)
        if has_bar:
            logs.enable_progress_bar()
    others = {
        it[0]: torch.empty(it[1], device="meta") for it in info["mismatched_keys"]
    }
    others |= dict.fromkeys(info["unexpected_keys"])
    drawn = {*info["missing_keys"], *others}
    found = {n: it for n, it in built.state_dict().items() if n not in drawn}
    return found | {name: state.get(name, it) for name, it in others.items()}


def _whole(state: State) -> State:
    return {name: _read(value) for name, value in state.items()}


def _part(name: str) -> str:
    backbone = "backbone." if name.startswith("backbone.") else ""
    return backbone + name.removeprefix(backbone).partition(".")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
