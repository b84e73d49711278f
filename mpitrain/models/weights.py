"""Weights from a file into a model, which may have another head and other channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from mpitrain.errors import DataError
from mpitrain.models import from_timm, zoo
from mpitrain.models.head import head_of
from mpitrain.models.layers import adapt_filters, first_layer
from mpitrain.models.weight_files import State, read_state

WRAPPERS = ("module.", "model.", "backbone.")
"""What other programs put before the names of weights."""


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """What became of the weights that a model was to begin with."""

    source: str
    """A file, or the library's name for them."""
    num_loaded: int | None = None
    """Tensors that were taken over; ``None`` where the library did it."""
    fitted: tuple[str, ...] = ()
    """What did not fit and was changed, in words."""
    missing: tuple[str, ...] = ()
    """Names in the model that the source lacks: of the head alone."""
    unexpected: tuple[str, ...] = ()
    """Names in the source that the model lacks."""

    def line(self) -> str:
        """Say it in one line.

        >>> LoadedWeights(source="a.pt", num_loaded=60, fitted=("fc new",)).line()
        'weights from a.pt: 60 tensors; fc new'
        """
        words = list(self.fitted)
        if self.num_loaded is not None:
            words.insert(0, f"{self.num_loaded} tensors")
        if self.missing:
            words.append(f"new {some(self.missing)}")
        if self.unexpected:
            words.append(f"{len(self.unexpected)} not used ({some(self.unexpected)})")
        return (
            f"weights from {self.source}" + (": " if words else "") + "; ".join(words)
        )


def load_weights(model: nn.Module, path: Path) -> LoadedWeights:
    """Load a file of weights into a model, in place.

    Args:
        model: Any model.
        path: See `read_state`.

    Returns:
        What was done; equal on all ranks that see the same file.

    Raises:
        UsageError: There is no such file.
        DataError: It holds no weights, or those of another architecture.
    """
    return load_state(model, read_state(path), str(path))


def load_state(model: nn.Module, state: State, source: str) -> LoadedWeights:
    """Load weights by name into a model, in place.

    The head keeps its own weights if the number of classes differs; the first layer's
    filters are adapted to its number of channels.

    Args:
        model: Any model.
        state: Its weights, or those of the same architecture.
        source: Where they are from, for messages.

    Returns:
        What was done.

    Raises:
        DataError: They are not for this architecture; the model is unchanged.
    """
    target = model.state_dict()  # loaded as a whole, with its notes about versions
    state = translated(model, respelled(state, target.keys()), source)
    head, first = names_of_ends(model)
    fitting: State = {}
    fitted: dict[str, str] = {}
    wrong: list[str] = []
    for name, value in state.items():
        mine = target.get(name)
        if not isinstance(mine, Tensor) or shape(value) == shape(mine):
            fitting[name] = value
        elif not isinstance(value, Tensor):
            wrong.append(f"{name} is a {type(value).__name__}")
        elif name.startswith(head) and shape(value)[1:] == shape(mine)[1:]:
            fitted[head] = (
                f"{head[:-1]} new ({mine.shape[0]} classes instead of {value.shape[0]})"
            )
        elif name == first and without_channels(value) == without_channels(mine):
            fitting[name] = adapt_filters(value, mine.shape[1])
            fitted[name] = f"{name} from {value.shape[1]} channels to {mine.shape[1]}"
        else:
            wrong.append(f"{name} {shape(value)}, expected {shape(mine)}")
    if head in fitted:
        fitting = {k: v for k, v in fitting.items() if not k.startswith(head)}
    unexpected = [name for name in fitting if name not in target]
    missing = [
        name
        for name in target
        if name not in state and not name.endswith(".num_batches_tracked")
    ]
    refuse(
        model,
        source,
        missing=[name for name in missing if not name.startswith(head)],
        wrong=wrong,
        strangers=strangers_in(unexpected, target.keys(), head),
    )
    taken = {name: value for name, value in fitting.items() if name in target}
    target.update(taken)
    model.load_state_dict(target)
    return LoadedWeights(
        source=source,
        num_loaded=len(taken),
        fitted=tuple(fitted.values()),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
    )


def refuse(
    model: nn.Module,
    source: str,
    *,
    missing: Sequence[str],
    wrong: Sequence[str],
    strangers: Sequence[str],
) -> None:
    """Raise what is wrong with weights, if anything is."""
    found = [
        f"{len(names)} {words} ({some(names)})"
        for names, words in (
            (missing, "missing"),
            (wrong, "of another shape"),
            (strangers, "that have no place in it"),
        )
        if names
    ]
    if found:
        raise DataError(
            f"the weights from {source} are not those of this {type(model).__name__}: "
            f"{'; '.join(found)}.\nExpected the same architecture; only the number of "
            "classes and the channels of the images may differ."
        )


def strangers_in(
    unexpected: Iterable[str], known: Iterable[str], head: str
) -> list[str]:
    """Find the weights that show another architecture: more layers than the model has.

    Whole parts that the model does not have (a decoder, a second head) are none.

    >>> strangers_in(["layer1.9.weight", "decoder.weight"], ["layer1.0.weight"], "fc.")
    ['layer1.9.weight']
    """
    parts = {part_of(name) for name in known}
    return [n for n in unexpected if part_of(n) in parts and not n.startswith(head)]


def part_of(name: str) -> str:
    """Return the part of a model that a weight is in.

    >>> part_of("layer1.0.bias"), part_of("backbone.layer1.0.bias")
    ('layer1', 'backbone.layer1')
    """
    backbone = "backbone." if name.startswith("backbone.") else ""
    return backbone + name.removeprefix(backbone).partition(".")[0]


def names_of_ends(model: nn.Module) -> tuple[str, str]:
    """Return what the head's weights' names begin with, and the first filters' name."""
    try:
        head = head_of(model)[0] + "."
    except DataError:
        head = "(no head)"
    first = first_layer(model)
    fits = first is not None and first[1].groups == 1
    return head, f"{first[0]}.weight" if first and fits else "(no filters)"


def respelled(state: State, known: Iterable[str]) -> State:
    """Name weights as the model does, where wrappers put their own names before.

    Args:
        state: Weights as a file has them.
        known: The model's names.

    Returns:
        The spelling that shares most names with the model.

    >>> respelled({"module.fc.weight": 0}, ["fc.weight"])
    {'fc.weight': 0}
    """
    known = set(known)
    spellings = [{k.replace("_orig_mod.", ""): v for k, v in state.items()}]
    for spelling in spellings:  # grows: one wrapper may be inside another
        spellings += [
            {name.removeprefix(wrapper): value for name, value in spelling.items()}
            for wrapper in WRAPPERS
            if any(name.startswith(wrapper) for name in spelling)
        ]
    spellings += [{f"backbone.{k}": v for k, v in s.items()} for s in spellings]
    return max(spellings, key=lambda spelling: len(known & spelling.keys()))


def translated(model: nn.Module, state: State, source: str) -> State:
    """Let the model's library bring older names and other image sizes up to date."""
    library = type(model).__module__.partition(".")[0]
    translate = {"torchvision": zoo.translate, "timm": from_timm.translate}.get(library)
    if translate is None:
        return state
    try:
        return translate(model, state)
    except Exception as error:
        raise DataError(
            f"the weights from {source} are not those of this {type(model).__name__}: "
            f"{library} could not fit them ({type(error).__name__}: {error})"
        ) from error


def shape(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor; that of a number for anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def without_channels(value: Tensor) -> tuple[int, ...]:
    """Return the shape of filters, `(O, C, H, W)`, but for C."""
    return shape(value)[:1] + shape(value)[2:]


def some(names: Sequence[str]) -> str:
    """Name the first three.

    >>> some(["a", "b", "c", "d"])
    'a, b, c, ...'
    """
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
