"""The first layer and the head of any model, and a trial run without numbers.

The head is the layer that turns features into scores of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mpitrain.errors import DataError

HEAD_NAMES = ("head", "heads", "fc", "classifier")


class Sizes(NamedTuple):
    """Sizes that a model is built for; images are `(N, C, H, W)`, square."""

    num_classes: int
    in_channels: int
    image_size: int


def check_is_module(name: str, model: object) -> nn.Module:
    """Return what ``--model NAME`` returned, or refuse it if it is not a module."""
    if not isinstance(model, nn.Module):
        raise DataError(
            f"--model {name} returned {type(model).__name__!r}; "
            "expected a torch.nn.Module"
        )
    return model


def first_conv(model: nn.Module) -> tuple[str, nn.Conv2d] | None:
    """Return name and module of the first convolution; ``None`` without one."""
    modules = model.named_modules()
    return next(((n, m) for n, m in modules if isinstance(m, nn.Conv2d)), None)


def last_layer(module: nn.Module, prefix: str = "") -> tuple[str, nn.Module] | None:
    """Return the last linear layer; without any, the last convolution."""
    for kind in (nn.Linear, nn.Conv2d):
        parts = module.named_modules(prefix=prefix)
        found = [(name, part) for name, part in parts if isinstance(part, kind)]
        if found:
            return found[-1]
    return None


def adapt_filters(filters: Tensor, in_channels: int) -> Tensor:
    """Adapt filters `(O, C, H, W)` to another number of channels C.

    They are summed, or repeated and scaled, as in `timm.models.adapt_input_conv`.
    """
    channels = filters.shape[1]
    if in_channels == 1:
        return filters.sum(dim=1, keepdim=True)
    repeated = filters.repeat(1, -(-in_channels // channels), 1, 1)[:, :in_channels]
    return repeated * (channels / in_channels)


def fit_first_conv(
    model: nn.Module, in_channels: int, *, pretrained: bool = False
) -> str | None:
    """Replace the first convolution if it takes another number of channels.

    With `pretrained` its filters are adapted; else new ones are drawn, scaled so that
    the output keeps its variance. Returns the change, for the user.
    """
    found = first_conv(model)
    if not found or found[1].in_channels == in_channels or found[1].groups != 1:
        return None
    name, old = found
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


def try_one_image(model: nn.Module, sizes: Sizes, height: int | None = None) -> object:
    """Run one image through a model in evaluation mode; raise what the model raises.

    ``height``: in pixels, of images that are not square. The run computes shapes only
    (torch's device ``meta``) if the model allows that.
    """
    size = sizes.image_size
    shape = (1, sizes.in_channels, height or size, size)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            try:  # `functional_call`, since `to("meta")` would drop the model's numbers
                with torch.device("meta"):
                    images = (torch.zeros(shape),)
                    on_meta = _tensors_on_meta(model)
                    return functional_call(model, on_meta, images, tie_weights=False)
            except Exception:  # of the image or of the device: the real run tells
                return model(torch.zeros(shape))
    finally:
        model.train(training)


def _tensors_on_meta(model: nn.Module) -> dict[str, Tensor]:
    """Return tensors without numbers for those of a model; tied ones are one tensor."""
    found: dict[str, Tensor] = {}
    copies: dict[Tensor, Tensor] = {}
    # Each module once: of two names of a shared one, `functional_call` would put back
    # under the second what it has put in under the first (torch 2.14).
    for prefix, module in model.named_modules():
        for name, tensor in chain(
            module.named_parameters(prefix, recurse=False, remove_duplicate=False),
            module.named_buffers(prefix, recurse=False, remove_duplicate=False),
        ):
            if tensor not in copies:
                copies[tensor] = tensor.to("meta")
            found[name] = copies[tensor]
    return found


class WithHead(nn.Module):
    """A backbone `(N, ...) -> (N, F)` with a head `(N, F) -> (N, num_classes)`."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores `(N, num_classes)`."""
        return self.head(self.backbone(inputs))  # type: ignore[no-any-return]


def head_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Find the head of a model: the layer that is trained alone on a frozen backbone.

    The first of: the module named by the model's attribute `head_name`; timm's
    `get_classifier()`; the last linear layer in `head`, `heads`, `fc` or `classifier`;
    the last linear layer of the model. Returned with its name among the modules.
    """
    head_name = getattr(model, "head_name", None)
    if isinstance(head_name, str):
        try:
            return head_name, model.get_submodule(head_name)
        except AttributeError:
            raise DataError(
                f"{type(model).__name__} says head_name = {head_name!r}, but has no "
                "module of that name; expected one of its named_modules()"
            ) from None
    if callable(get_classifier := getattr(model, "get_classifier", None)):
        classifier = get_classifier()
        for name, module in model.named_modules():
            if module is classifier and name and list(module.parameters()):
                return name, module
    for name in HEAD_NAMES:
        part = getattr(model, name, None)
        if isinstance(part, nn.Module) and (found := last_layer(part, name)):
            return found
    found = last_layer(model)
    if found is None or not isinstance(found[1], nn.Linear) or not found[0]:
        raise DataError(
            f"{type(model).__name__} has no head: expected a linear layer, best under "
            "the name head, fc or classifier, or an attribute that names the module: "
            "head_name = 'name.of.the.module'"
        )
    return found


def features_before_head(
    model: nn.Module, inputs: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """Return what maps inputs to the tensor `(N, ..., F)` that a model's head receives.

    The head still runs. ``None`` if the model computes more after its head, as
    squeezenet does, or does not call it once with one tensor; tried on `inputs` in
    evaluation mode.
    """
    head = head_of(model)[1]

    def call(batch: Tensor) -> tuple[object, list[tuple[object, ...]]]:
        calls: list[tuple[object, ...]] = []
        with head.register_forward_hook(
            lambda _, args, out: calls.append((*args, out))
        ):
            return model(batch), calls

    training = model.training
    model.eval()
    with torch.no_grad():
        output, calls = call(inputs)
    model.train(training)
    if [len(it) for it in calls] != [2] or output is not calls[0][1]:
        return None
    if not isinstance(calls[0][0], Tensor):
        return None
    return lambda batch: call(batch)[1][0][0]  # type: ignore[return-value]
