"""Random numbers that belong to a sample, not to the process that handles it.

They depend on seed, epoch and the sample's number alone: the same on any rank, in any
worker, on any device. So augmentation does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.sharding import Indices

_STEP = np.uint64(0x9E3779B97F4A7C15)
_ALL_BITS = 2**64 - 1


def uniform(
    seed: int, epoch: int, indices: Indices, num: int, purpose: str
) -> npt.NDArray[np.float64]:
    """Return `num` random numbers in [0, 1) per sample, float64 `(N, num)`.

    `indices` are the samples' numbers, int64 `(N,)`. Numbers for two purposes are
    independent.
    """
    key = _key(seed, epoch, purpose)
    columns = np.arange(num, dtype=np.uint64)
    counters = indices.astype(np.uint64)[:, None] * np.uint64(num) + columns
    bits = _mixed(_mixed(counters * _STEP + key) + key)
    # As many bits as a float64 holds: more could be rounded up to 1.
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@functools.lru_cache(maxsize=64)
def rank_seed(seed: int, rank: int) -> int:
    """Return a seed for one rank that no rank of another run has."""
    return int(_key(seed, rank, "rank")[0] >> np.uint64(1))


@functools.lru_cache(maxsize=64)
def _key(seed: int, epoch: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Mix what all samples of an epoch have in common, uint64 `(1,)`."""
    key = np.zeros(1, np.uint64)  # no scalar: NumPy warns where these wrap around
    for part in (seed, epoch, *purpose.encode()):
        key = _mixed((key ^ np.uint64(part)) + _STEP)
    return key


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix bits as SplitMix64 does (Steele, Lea, Flood: OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed of a sample of a custom data set, 32 bits.

    >>> found = uniform(1, 2, np.array([3]), 1, "sample")
    >>> sample_seed(1, 2, 3) == int(found[0, 0] * 2**32)
    True
    """
    # As `uniform`, by plain integers: for one number NumPy takes 30 times as long, and
    # a stream is asked for each sample, also for those that a resume skips.
    key = int(_key(seed, epoch, "sample")[0])
    return _mixed_int(_mixed_int(index * int(_STEP) + key) + key) >> 32


def _mixed_int(x: int) -> int:
    x &= _ALL_BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _ALL_BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _ALL_BITS
    return x ^ (x >> 31)


def batch_seed(seed: int, epoch: int, indices: Indices) -> int:
    """Return the seed of a batch of some samples, of which numbers are drawn."""
    found = hashlib.blake2b(indices.tobytes(), digest_size=4).digest()
    return int(_key(seed, epoch, "batch")[0]) % 2**32 ^ int.from_bytes(found)


def step_seed(seed: int, epoch: int, step: int, purpose: str) -> int:
    """Return a seed that is equal on all ranks, for a step of the training."""
    key = f"{seed} {epoch} {step} {purpose}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest())


def seed_all(seed: int, device: str = "cpu") -> None:
    """Seed torch, numpy and `random`; also a device other than the CPU."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes no more
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes 0.1 ms
    if device != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed torch, numpy and `random` for one sample in this context."""
    with own_random_state():
        seed_all(sample_seed(seed, epoch, index))
        yield


@contextlib.contextmanager
def own_random_state(device: str = "cpu") -> Iterator[None]:
    """Let the process have its random numbers back at the end of this context.

    Also those of a device other than the CPU, if it draws there. It takes 0.1 ms, most
    of it for NumPy's: not for each sample.
    """
    import torch

    of_python, of_numpy, of_torch, *of_device = _states(device)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for state in of_device:
            torch.get_device_module(device).set_rng_state(state, device)


def random_state(device: str = "cpu") -> list[object]:
    """Return the state of torch, numpy and `random`; equal if none has drawn."""
    of_python, of_numpy, *of_torch = _states(device)
    of_numpy = of_numpy[1].tobytes(), of_numpy[2:]
    return [of_python, of_numpy, *(it.numpy().tobytes() for it in of_torch)]


def _states(device: str) -> list[Any]:
    """Return the states of `random`, NumPy, torch, and of a device besides the CPU."""
    import torch

    found = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    if device != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(device))
    return found
