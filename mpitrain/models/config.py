"""Which model is trained; part of the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    model: str = "convnet"
    """convnet, a torchvision model (resnet50), timm:NAME, hub:REPO_OR_DIR:ENTRY, or
    package.module:callable."""
    weights: str | None = None
    """Initial weights: a file, default, or a name that the library knows. Default:
    random."""
