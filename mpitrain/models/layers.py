"""First and last layers of any model: find them, fit them to the data, try them out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call


def first_layer(model: nn.Module) -> tuple[str, nn.Conv2d] | None:
    """Find the layer that meets the image: the first convolution, if there is one.

    Args:
        model: Any model.

    Returns:
        Its name and itself; ``None`` without one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return name, module
    return None


def last_layer(module: nn.Module, prefix: str = "") -> tuple[str, nn.Module] | None:
    """Find the last linear layer of a module; without any, the last convolution.

    Args:
        module: A model, or a part of one.
        prefix: The part's own name in the model.

    Returns:
        Its name in the model and itself; ``None`` without one.
    """
    for kind in (nn.Linear, nn.Conv2d):
        found = [
            (name, part)
            for name, part in module.named_modules(prefix=prefix)
            if isinstance(part, kind)
        ]
        if found:
            return found[-1]
    return None


def adapt_filters(filters: Tensor, in_channels: int) -> Tensor:
    """Turn filters for some channels into filters for others, the output alike in size.

    For one channel they are summed; for more they are repeated and scaled, as timm does
    (`timm.models.adapt_input_conv`).

    Args:
        filters: Weights of a convolution, `(O, C, H, W)`.
        in_channels: The C to come.

    Returns:
        `(O, in_channels, H, W)`, of the same dtype.

    >>> adapt_filters(torch.ones(1, 3, 1, 1), 1).flatten().tolist()
    [3.0]
    >>> adapt_filters(torch.ones(1, 3, 1, 1), 6).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    """
    channels = filters.shape[1]
    if in_channels == 1:
        return filters.sum(dim=1, keepdim=True)
    repeated = filters.repeat(1, -(-in_channels // channels), 1, 1)[:, :in_channels]
    return repeated * (channels / in_channels)


def fit_first_layer(
    model: nn.Module, in_channels: int, *, pretrained: bool = False
) -> str | None:
    """Let a model take images of another number of channels, in place.

    Args:
        model: Changed where its first convolution takes another number.
        in_channels: C of an input `(N, C, H, W)`.
        pretrained: Keep what the filters have learned; else draw new ones, whose output
            deviates as much as that of the old.

    Returns:
        What was done, in words; ``None`` where nothing was, or nothing can be.
    """
    name, old = first_layer(model) or ("", None)
    if not name or old is None or old.in_channels == in_channels or old.groups != 1:
        return None
    new = nn.Conv2d(
        in_channels,
        old.out_channels,
        kernel_size=old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        dilation=old.dilation,  # type: ignore[arg-type]
        bias=old.bias is not None,
        padding_mode=old.padding_mode,
    )
    with torch.no_grad():
        if pretrained:
            new.weight.copy_(adapt_filters(old.weight, in_channels))
        else:
            deviation = old.weight.std() * (old.in_channels / in_channels) ** 0.5
            new.weight.normal_().mul_(deviation)
        if old.bias is not None and new.bias is not None:
            new.bias.copy_(old.bias)
    model.set_submodule(name, new)
    return f"{name} from {old.in_channels} channels to {in_channels}"


def try_one_image(model: nn.Module, in_channels: int, image_size: int) -> object:
    """Run an image of zeros through a model in evaluation mode, at almost no cost.

    The run is one of shapes alone (torch's device ``meta``) where the model allows it.

    Args:
        model: Any model; its mode and weights are left as they are.
        in_channels: C of an input `(N, C, H, W)`.
        image_size: H and W, in pixels.

    Returns:
        What the model returned; only shapes and identities mean something.

    Raises:
        Exception: Whatever the model raises.
    """
    shape = (1, in_channels, image_size, image_size)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            try:
                return _on_meta(model, shape)
            except Exception:  # of the image, or of the device: the real run tells
                return model(torch.zeros(shape))
    finally:
        model.train(training)


def _on_meta(model: nn.Module, shape: tuple[int, ...]) -> object:
    """Run a model whose tensors have no numbers."""
    tensors: Iterator[tuple[str, Tensor]] = chain(
        model.named_parameters(), model.named_buffers()
    )
    with torch.device("meta"):
        on_meta = {name: tensor.to("meta") for name, tensor in tensors}
        return functional_call(model, on_meta, (torch.zeros(shape),))
