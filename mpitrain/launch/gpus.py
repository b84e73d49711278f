"""The GPUs that this process sees, by names that are the same in every process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.launch import nccl, nvml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device that CUDA (or ROCm) offers to a process."""

    uuid: str
    """Its name everywhere: two processes that see this name see one device."""
    chip: str = ""
    """The physical GPU: several MIG slices are on one. ``""``: the device is it."""
    compute_mode: int = 0
    """Who may use it; see `mpitrain.launch.nvml.Card`."""

    @property
    def physical(self) -> str:
        """The physical GPU's name."""
        return self.chip or self.uuid


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one rank sees."""

    gpus: tuple[Gpu, ...] = ()
    """The GPUs, in the order of their indices."""
    has_nccl: bool = False
    """Whether torch has NCCL, or AMD's RCCL."""
    why_not_shared: str = ""
    """Why NCCL's ranks cannot share a GPU; ``""``: they can."""
    mps: bool = False
    """Whether CUDA MPS runs on this host."""


def look(environ: Mapping[str, str]) -> Sight:
    """Look for GPUs without starting CUDA, as far as the driver allows it.

    Args:
        environ: This process's environment.

    Returns:
        What there is; without a GPU nothing else is asked.
    """
    gpus = visible_gpus(environ)
    if not gpus:
        return Sight()
    import torch
    import torch.distributed as dist

    has_nccl = dist.is_nccl_available()
    version: tuple[int, ...] = ()
    if has_nccl:
        version = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    is_rocm = torch.version.hip is not None
    return Sight(
        gpus=gpus,
        has_nccl=has_nccl,
        why_not_shared=nccl.why_not_shared(version, environ, is_rocm=is_rocm),
        mps=nccl.mps_is_running(environ),
    )


def visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Name the GPUs that torch sees in this process, by index.

    NVML names them without starting CUDA in this process. Where it cannot tell for
    certain which GPU has which index (a GPU cut by MIG, models that differ, another
    vendor), torch is asked, which starts CUDA.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return ()
    if torch.version.hip is None:
        value = environ.get("CUDA_VISIBLE_DEVICES")
        order = environ.get("CUDA_DEVICE_ORDER", "")
        found = named_by_driver(value, order, nvml.cards(), nvml.parent_of)
        if found is not None and any(gpu.chip for gpu in found):
            return found[:count]  # of several MIG slices CUDA takes the first
        if found is not None and len(found) == count:
            return found
    return tuple(_named_by_torch(index) for index in range(count))


def named_by_driver(
    value: str | None,
    order: str,
    cards: Sequence[nvml.Card] | None,
    parent_of: Callable[[str], str | None],
) -> tuple[Gpu, ...] | None:
    """Work out which GPUs CUDA_VISIBLE_DEVICES names.

    It holds indices, UUIDs or beginnings of UUIDs; the first that does not exist ends
    the list, and one that comes twice empties it
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables).

    Args:
        value: The variable; ``None``: not set.
        order: CUDA_DEVICE_ORDER; unless it is ``"PCI_BUS_ID"``, CUDA counts the fastest
            model first, and NVML does not tell which that is.
        cards: All GPUs of this host, by PCI bus; ``None``: unknown.
        parent_of: Finds the GPU of a MIG slice.

    Returns:
        The GPUs by index; ``None`` where it cannot be told for certain.

    >>> cards = [nvml.Card(uuid=f"GPU-{x}", name="H200") for x in ("aa", "ab", "b")]
    >>> named_by_driver("2,0", "", cards, str)
    (Gpu(uuid='b', chip='', compute_mode=0), Gpu(uuid='aa', chip='', compute_mode=0))
    """
    if cards is None:
        return None
    words = [word.strip() for word in value.split(",")] if value is not None else None
    if words and words[0].startswith("MIG-"):
        slices = [word for word in words if word.startswith("MIG-")]
        return tuple(Gpu(uuid=word, chip=_bare(parent_of(word))) for word in slices)
    if any(card.mig for card in cards):
        return None  # a GPU that is cut has no index of its own
    by_index = words is None or not words[0].startswith("GPU-")
    if by_index and order != "PCI_BUS_ID" and len({card.name for card in cards}) > 1:
        return None
    indices: list[int] = []
    for word in words if words is not None else map(str, range(len(cards))):
        index = _index(word, cards)
        if index is None:
            break
        if index in indices:
            return ()
        indices.append(index)
    return tuple(
        Gpu(uuid=_bare(cards[i].uuid), compute_mode=cards[i].compute_mode)
        for i in indices
    )


def _index(word: str, cards: Sequence[nvml.Card]) -> int | None:
    if word.startswith("GPU-"):
        found = [i for i, card in enumerate(cards) if card.uuid.startswith(word)]
        return found[0] if len(found) == 1 else None
    number = re.match(r"\+?\d+", word)  # as C's strtoul: what follows is not read
    return int(number[0]) if number and int(number[0]) < len(cards) else None


def _bare(uuid: str | None) -> str:
    """Write a UUID as torch does; a MIG slice whose GPU is unknown is on any."""
    return (uuid or "unknown").removeprefix("GPU-")


def _named_by_torch(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    if torch.version.hip is not None or not uuid:
        # Some of AMD's devices share a UUID; the bus tells them apart.
        bus = [
            getattr(properties, f"pci_{x}_id", "") for x in ("domain", "bus", "device")
        ]
        uuid = "/".join(map(str, (uuid, *bus)))
    return Gpu(uuid=uuid)
