"""Images: decoded and cut as torchvision would, or refused by name."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from mpitrain.data.samples import BadSample
from mpitrain.tasks.image_classification.datasets.images import crop, crop_box, decode


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Slopes, blobs and noise: something of every frequency."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    slopes = np.stack([x * 255 / width, y * 255 / height, (x + y) % 256], -1)
    blobs = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(blobs).resize((width, height), 3))
    noise = generator.normal(0, 8, (height, width, 1))
    mixed = slopes * 0.5 + soft * 0.4 + noise
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def torchvisions(data: bytes, size: int) -> torch.Tensor:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    steps = (v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor())
    return v2.Compose(steps)(image)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.float() - other.float()).abs().mean().item()


def numbers(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (20, 31)])
def test_evaluation_is_torchvisions(height: int, width: int, size: int) -> None:
    data = encoded(picture(height, width))
    found = decode(data, size, None, "a.png")
    expected = torchvisions(data, size)
    assert (found.dtype, found.shape) == (torch.uint8, (3, size, size))
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
@pytest.mark.parametrize(("height", "width"), [(1503, 2001), (640, 480), (97, 1001)])
def test_photographs_decoded_at_a_reduced_scale_are_close(
    height: int, width: int, options: dict[str, Any]
) -> None:
    data = encoded(picture(height, width), "JPEG", quality=90, **options)
    assert distance(decode(data, 64, None, "a.jpg"), torchvisions(data, 64)) < 2


def test_an_image_of_the_wanted_size_is_kept_as_it_is() -> None:
    image = picture(32, 32)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(decode(encoded(image), 32, None, "a.png"), pixels)
    assert torch.equal(crop(pixels.numpy(), 32, None), pixels)


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *(("L", form) for form in ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF")),
        *(("RGB", form) for form in ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")),
        ("1", "PNG"),
        ("P", "PNG"),
        ("P", "GIF"),
        ("LA", "PNG"),
        ("RGBA", "PNG"),
        ("RGBA", "WEBP"),
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
    ],
)
def test_images_of_every_kind_become_rgb(mode: str, form: str) -> None:
    data = encoded(picture(60, 80).convert(mode), form)
    found = decode(data, 32, None, "a")
    assert found.shape == (3, 32, 32)
    assert distance(found, torchvisions(data, 32)) < 2


def test_a_palette_with_transparency_is_no_warning() -> None:
    image = picture(40, 40).quantize(16)
    data = encoded(image, transparency=bytes(range(16)))
    expected = np.array(image.convert("RGB")).transpose(2, 0, 1)
    assert torch.equal(decode(data, 40, None, "a"), torch.from_numpy(expected))


def test_sixteen_bits_keep_the_upper_eight() -> None:
    values = (np.arange(64 * 64) * 16).astype(np.uint16).reshape(64, 64)
    expected = torch.from_numpy((values >> 8).astype(np.uint8)).expand(3, 64, 64)
    for data in (
        encoded(Image.fromarray(values)),
        b"P5 64 64 65535\n" + values.astype(">u2").tobytes(),
    ):
        assert torch.equal(decode(data, 64, None, "a"), expected)
    floats = encoded(Image.fromarray(values.astype(np.float32)), "TIFF")
    with pytest.raises(BadSample, match="mode 'F', expected 8 or 16 bits"):
        decode(floats, 64, None, "a")


def test_the_orientation_in_exif_is_ignored() -> None:
    image = picture(40, 60)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    turned = decode(encoded(image, "JPEG", exif=exif), 32, None, "a")
    assert torch.equal(turned, decode(encoded(image, "JPEG"), 32, None, "a"))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty, 0 bytes"),
        (b"<html>not found</html>", "not an image to Pillow"),
        (b"\xff\xd8\xff", "not an image to Pillow"),
        (b"P6 9 9 255\nabc", "cannot be decoded, OSError: .*truncated"),
    ],
)
def test_what_is_no_image_is_refused_by_name(data: bytes, why: str) -> None:
    with pytest.raises(BadSample, match=f"^train/cat/7.jpg: .*{why}") as caught:
        decode(data, 32, None, "train/cat/7.jpg")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {}) for form in ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")),
        ("JPEG", {"progressive": True}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_truncated_image_is_never_filled_up(form: str, options: dict) -> None:
    data = encoded(picture(48, 56), form, **options)
    whole = decode(data, 32, None, "a")
    ends = {*range(1, len(data), len(data) // 40), *range(len(data) - 12, len(data))}
    refused = 0
    for end in ends:
        try:
            found = decode(data[:end], 32, None, "a")
        except BadSample:
            refused += 1
        else:
            assert torch.equal(found, whole), end  # what was cut off is no pixel
    assert refused > len(ends) // 2


def test_a_jpeg_whose_end_is_zeros_is_truncated() -> None:
    data = encoded(picture(200, 200), "JPEG")
    half = data[: len(data) // 2] + bytes(1_000_000)
    with pytest.raises(BadSample, match="truncated"):
        decode(half, 32, None, "a")
    padded = decode(data + bytes(99), 32, None, "a")
    assert torch.equal(padded, decode(data, 32, None, "a"))


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadSample, match="DecompressionBombError"):
        decode(encoded(picture(30, 30)), 8, None, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # between one and two times the limit
        assert decode(encoded(picture(12, 12)), 8, None, "a").shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (333, 500), (1, 1), (1000, 10), (10, 1000)]
)
def test_random_crops_lie_inside_the_image(width: int, height: int) -> None:
    generator = np.random.default_rng(1)
    corners = [numbers(*(float(i >> k & 1) for k in range(4))) for i in range(16)]
    for uniform in [*corners, *generator.random((500, 4))]:
        left, top, right, bottom = crop_box(width, height, 224, uniform)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        wide, high = right - left, bottom - top
        assert 0.7499 < wide / high < 1.3334
        assert wide * high < 1.0001 * width * height
        touches = wide > width - 1e-6 or high > height - 1e-6
        assert touches or wide * high > 0.0799 * width * height


def test_a_random_crop_is_a_function_of_its_numbers() -> None:
    for data in (encoded(picture(90, 120)), encoded(picture(900, 1200), "JPEG")):
        first = decode(data, 32, numbers(0.3, 0.4, 0.5, 0.6), "a")
        assert torch.equal(first, decode(data, 32, numbers(0.3, 0.4, 0.5, 0.6), "a"))
        for i in range(4):
            other = numbers(0.3, 0.4, 0.5, 0.6)
            other[i] += 0.2
            assert not torch.equal(first, decode(data, 32, other, "a"))


def test_the_largest_square_crop_of_a_square_is_the_whole() -> None:
    image = picture(100, 100)
    expected = np.array(image.resize((32, 32), Image.Resampling.BILINEAR))
    found = decode(encoded(image), 32, numbers(1, 0.5, 0.2, 0.9), "a")
    assert distance(found, torch.from_numpy(expected).permute(2, 0, 1)) < 0.5


def test_a_crop_of_a_reduced_photograph_is_the_crop_of_the_whole() -> None:
    data = encoded(picture(1501, 2003), "JPEG", quality=92)
    pixels = np.array(Image.open(io.BytesIO(data))).transpose(2, 0, 1)
    for uniform in (numbers(0.2, 0.9, 1, 1), numbers(0.9, 0.1, 0.5, 0.5)):
        found = decode(data, 48, uniform, "a")
        assert distance(found, crop(pixels, 48, uniform)) < 2


@pytest.mark.parametrize("channels", [1, 3, 4, 7])
@pytest.mark.parametrize("uniform", [None, numbers(0.2, 0.3, 0.4, 0.5)])
def test_decoded_arrays_are_cut_alike(channels: int, uniform: Any) -> None:
    image = picture(60, 80)
    pixels = np.array(image).transpose(2, 0, 1)
    chosen = np.arange(channels) % 3
    found = crop(pixels[chosen], 32, uniform)
    expected = decode(encoded(image), 32, uniform, "a")[chosen]
    assert found.dtype == torch.uint8
    assert torch.equal(found, expected)
