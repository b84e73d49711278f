"""From bytes to what a model sees: exact for each sample, in whatever batch it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import transforms

from mpitrain.data.randomness import uniform
from mpitrain.tasks.image_classification.transforms import (
    SCALED,
    ImageTransform,
    mean_and_std,
)

SEED, EPOCH = 3, 2

SHAPES = [(1, 28, 28), (3, 32, 32), (1, 8, 8), (4, 5, 9), (3, 1, 1)]


def images_of(num: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (num, *shape), generator=generator).to(dtype)


def numbers_of(num: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(60_000)[:num].astype(np.int64)


def cut_one(image: Tensor, number: int, border: int, flip: bool) -> Tensor:
    """One image, in the plainest words."""
    draw = uniform(SEED, EPOCH, np.array([number]), 3, "pixels")[0]
    top, left = (int(it * (2 * border + 1)) for it in draw[:2])
    height, width = image.shape[1:]
    bordered = image.new_zeros(len(image), height + 2 * border, width + 2 * border)
    bordered[:, border : border + height, border : border + width] = image
    cut = bordered[:, top : top + height, left : left + width]
    return cut.flip(-1) if flip and draw[2] < 0.5 else cut


def pixels(**settings: Any) -> ImageTransform:
    """Scale bytes to the range 0 to 1, if `settings` have no mean and deviation."""
    scaled = {"mean": SCALED[0], "std": SCALED[1]}
    return ImageTransform(
        **{"dtype": torch.float32, "seed": SEED, **scaled, **settings}
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("border", "flip"), [(2, True), (2, False), (0, True), (7, True), (0, False)]
)
def test_each_image_is_cut_as_its_number_says(
    shape: tuple[int, ...], dtype: torch.dtype, border: int, flip: bool
) -> None:
    images, numbers = images_of(33, shape, dtype), numbers_of(33)
    expected = torch.stack(
        [cut_one(*pair, border, flip) for pair in zip(images, numbers, strict=True)]
    )
    ours = pixels(dtype=torch.float64, border=border, flip=flip)
    scale = 1 / 255 if dtype == torch.uint8 else 1.0
    assert torch.equal(ours(images, numbers, EPOCH), expected.double() * scale)
    beside = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours(beside, numbers, EPOCH), expected.double() * scale)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_does_not_depend_on_its_batch(channels: int) -> None:
    images, numbers = images_of(300, (channels, 28, 28), torch.uint8), numbers_of(300)
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.3, 0.2, 0.7)[:channels]
    ours = pixels(border=3, flip=True, mean=mean, std=std)
    whole = ours(images, numbers, EPOCH)
    for part in (slice(0, 1), slice(7, 64), slice(64, 300), slice(None, None, 3)):
        assert torch.equal(ours(images[part], numbers[part], EPOCH), whole[part])
    assert not torch.equal(ours(images, numbers, EPOCH + 1), whole)


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("flip", [True, False])
def test_large_images_have_the_bits_of_their_parts(
    memory_format: torch.memory_format, dtype: torch.dtype, flip: bool
) -> None:
    """Small images take another way."""
    images, numbers = images_of(9, (3, 64, 70), torch.uint8), numbers_of(9)
    images = images.contiguous(memory_format=memory_format)
    ours = pixels(mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.7), dtype=dtype, flip=flip)
    whole = ours(images, numbers, EPOCH)
    bands = [ours(it, numbers, EPOCH) for it in images.split(8, dim=2)]
    assert whole.dtype == dtype
    assert torch.equal(whole, torch.cat(bands, dim=2))


def test_no_images_are_no_images() -> None:
    nothing = images_of(0, (3, 8, 8), torch.uint8)
    found = pixels(border=2, flip=True)(nothing, numbers_of(0), EPOCH)
    assert (found.shape, found.dtype) == ((0, 3, 8, 8), torch.float32)


def test_all_places_are_drawn_and_half_is_mirrored() -> None:
    number = 4000
    ramp = torch.arange(9.0).view(1, 1, 3, 3).repeat(number, 1, 1, 1) + 1
    found = pixels(border=1, flip=True)(ramp, np.arange(number), EPOCH)
    kinds, counts = found.flatten(1).unique(dim=0, return_counts=True)
    assert len(kinds) == 18  # 3 x 3 places, mirrored or not
    assert counts.min() > number / 18 * 0.7
    centred = ramp[:1].repeat(2, 1, 1, 1)
    centred[1] = centred[1].flip(-1)
    for image in centred:
        assert (kinds == image.flatten()).all(dim=1).any()


def test_the_input_is_left_as_it_was() -> None:
    for dtype in (torch.uint8, torch.float32):
        images = images_of(5, (1, 8, 8), dtype)
        before = images.clone()
        for settings in ({"border": 1, "flip": True}, {"flip": True}, {}):
            pixels(mean=(0.5,), std=(0.5,), **settings)(images, numbers_of(5), EPOCH)
        assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_normalized_as_by_torchvision(
    channels: int, dtype: torch.dtype
) -> None:
    images = images_of(4, (channels, 6, 6), torch.uint8)
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.3, 0.2, 0.7)[:channels]
    found = pixels(mean=mean, std=std, dtype=dtype)(images, numbers_of(4), EPOCH)
    expected = transforms.Normalize(mean, std)(images.to(dtype) / 255)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_evaluation_is_still() -> None:
    moving = pixels(border=2, flip=True)
    still = moving.deterministic()
    assert (moving.is_deterministic, still.is_deterministic) == (False, True)
    images, numbers = images_of(8, (1, 8, 8), torch.uint8), numbers_of(8)
    assert torch.equal(still(images, numbers, 1), images.float() * np.float32(1 / 255))


def test_images_are_resized_after_they_are_cut() -> None:
    images, numbers = images_of(8, (3, 16, 16), torch.uint8), numbers_of(8)
    found = pixels(border=2, flip=True, size=8, channels_last=True)(images, numbers, 1)
    assert found.shape == (8, 3, 8, 8)
    assert found.is_contiguous(memory_format=torch.channels_last)
    alone = pixels(border=2, flip=True, size=8)(images[3:4], numbers[3:4], 1)
    torch.testing.assert_close(found[3:4].contiguous(), alone)


def test_what_is_no_image_is_handed_on() -> None:
    ours = pixels(border=2, flip=True, dtype=torch.float64)
    tokens = torch.arange(6).view(2, 3)
    assert ours(tokens, numbers_of(2), 1) is tokens
    assert ours(tokens.float(), numbers_of(2), 1).dtype == torch.float64


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64, torch.uint16]
)
def test_what_is_no_float_is_taken_as_it_is_where_no_mean_is_given(
    dtype: torch.dtype,
) -> None:
    plain = ImageTransform(dtype=torch.float64, seed=SEED)
    inputs = torch.tensor([0, 1, 2, 255]).view(1, 1, 2, 2).to(dtype)
    found = plain(inputs, numbers_of(1), 1)
    assert found.dtype == dtype
    assert torch.equal(found, inputs)
    if dtype != torch.uint8:  # a mean is of bytes
        assert pixels()(inputs, numbers_of(1), 1).dtype == dtype


def test_mean_and_deviation_are_those_of_all_pixels() -> None:
    images = images_of(50, (3, 7, 7), torch.uint8)
    images[:, 1] = 9
    mean, std = mean_and_std(images)
    scaled = images.double() / 255
    assert mean == pytest.approx(scaled.mean(dim=(0, 2, 3)).tolist())
    expected = scaled.std(dim=(0, 2, 3), correction=0).tolist()
    assert std == pytest.approx([expected[0], 1.0, expected[2]])
