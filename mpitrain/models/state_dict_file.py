"""A ``state_dict`` in a file, as `torch.save` writes it, with one weight in memory."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.serialization import skip_data

# Of PKWARE's APPNOTE.TXT, 4.3.7 and 4.3.12: fixed sizes, and where the checksum is.
HEADER, HEADER_SUM, HEADER_LENGTHS = 30, 14, 26
ENTRY, ENTRY_SUM = 46, 16


def write_state_dict(
    path: Path, outline: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a file for `torch.load`; each weight is written when it comes.

    The same values make the same bytes, wherever they were and with whatever strides.
    Names of one tensor (tied weights) have one record. Neither is promised of a
    ``state_dict`` with extra states or sparse tensors, which is in memory as a whole.

    Args:
        path: Of a file that is replaced.
        outline: The ``state_dict``; only shapes and dtypes of its tensors are used.
        weights: Each value of the outline by its name, on the CPU.

    Raises:
        ValueError: A weight is missing, or not as in the outline.
    """
    if not all(map(_is_dense, outline.values())):
        torch.save(dict(weights), path)
        return
    identities = {name: _identity(value) for name, value in outline.items()}
    tensors = {identities[name]: _untouched(value) for name, value in outline.items()}
    empty = {name: tensors[it] for name, it in identities.items()}
    with skip_data():  # it leaves gaps, and the checksums of what it has not read
        torch.save(empty, path)
    records = _records(path)
    # torch numbers them as it meets them: archive/data/0, archive/data/1, ...
    numbers = {it: str(number) for number, it in enumerate(tensors)}
    places = {name: records[numbers[it]] for name, it in identities.items()}
    with path.open("r+b") as file:
        for name, weight in weights:
            expected = empty.pop(name)
            if (weight.shape, weight.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"{name} is {weight.dtype} {tuple(weight.shape)}; expected "
                    f"{expected.dtype} {tuple(expected.shape)}"
                )
            begin, *sums = places[name]
            flat = weight.contiguous().reshape(-1).view(torch.uint8)
            data = flat.numpy().data
            file.seek(begin)
            file.write(data)
            for place in sums:
                file.seek(place)
                file.write(struct.pack("<I", zlib.crc32(data)))
    if empty:
        raise ValueError(f"no numbers came of {', '.join(empty)}")


def _is_dense(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor)
    return is_tensor and value.layout == torch.strided and not value.is_quantized


def _identity(value: Tensor) -> tuple[object, ...]:
    """Return what is equal for the names of one tensor alone, sharded or not."""
    if hasattr(value, "to_local"):  # a DTensor, whose import takes a second
        value = value.to_local()
    ref = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
    # Not its address: all tensors on `meta` have the same.
    return ref.cdata, value.storage_offset(), value.shape, value.stride()


def _untouched(value: Tensor) -> Tensor:
    """Return a tensor like another; memory that is never touched takes none."""
    # `torch.empty` would fill it where algorithms are to be deterministic.
    num_bytes = value.numel() * value.dtype.itemsize
    storage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
    strides = torch.empty(value.shape, device="meta").stride()
    return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, strides)


def _records(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return where each record of a tensor begins, and where its checksums are."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entry = archive.start_dir
        for info in archive.infolist():
            file.seek(info.header_offset + HEADER_LENGTHS)
            of_name, of_extra = struct.unpack("<HH", file.read(4))
            begin = info.header_offset + HEADER + of_name + of_extra
            _, _, name = info.filename.partition("/data/")
            found[name] = begin, info.header_offset + HEADER_SUM, entry + ENTRY_SUM
            # The extra field is another one than in the header.
            entry += ENTRY + of_name + len(info.extra) + len(info.comment)
    return found
