"""The head of a model: the layer that turns features into scores of classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpitrain.errors import DataError
from mpitrain.models.layers import last_layer

HEAD_NAMES = ("head", "heads", "fc", "classifier")


class WithHead(nn.Module):
    """A backbone `(N, ...) -> (N, F)` with a head `(N, F) -> (N, num_classes)`."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores `(N, num_classes)`."""
        return self.head(self.backbone(inputs))  # type: ignore[no-any-return]


class Features(nn.Module):
    """Maps inputs to the tensor that a model's head receives; the head still runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head_name, _ = head_of(model)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the head receives for `inputs`, `(N, ..., F)`."""
        received: list[tuple[object, ...]] = []
        head = self.model.get_submodule(self.head_name)
        hook = head.register_forward_pre_hook(lambda _, args: received.append(args))
        try:
            self.model(inputs)
        finally:
            hook.remove()
        if len(received) == 1 and len(received[0]) == 1:
            features = received[0][0]
            if isinstance(features, Tensor):
                return features
        raise DataError(
            f"{type(self.model).__name__} called its head {self.head_name!r} "
            f"{len(received)} times; expected once, with one tensor, to train the head "
            "on features.\nName another by an attribute of the model: "
            "head_name = 'name.of.the.module'"
        )


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


def split_head(model: nn.Module, inputs: Tensor) -> tuple[Features, nn.Module] | None:
    """Split a model into features and head, so that ``head(features(x)) == model(x)``.

    ``None`` if the model computes more after its head, as squeezenet does, or does not
    call it once with one tensor; tried on `inputs` in evaluation mode.
    """
    features = Features(model)
    head = model.get_submodule(features.head_name)
    outputs: list[object] = []
    training = model.training
    model.eval()
    hook = head.register_forward_hook(lambda _, _args, output: outputs.append(output))
    try:
        with torch.no_grad():
            output = model(inputs)
            features(inputs)
    except DataError:
        return None
    finally:
        hook.remove()
        model.train(training)
    return (features, head) if outputs and output is outputs[0] else None
