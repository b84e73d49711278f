"""Which model is trained; part of the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network, and the weights it begins with."""

    model: str = "convnet"
    """Model: convnet, any of torchvision by name (resnet50), timm:NAME,
    hub:REPO_OR_DIR:ENTRY, or package.module:callable."""
    weights: str | None = None
    """Weights to begin with: a file, or a name that the model's library
    knows (default: its best). Default: random ones."""
