"""The configuration of a model in its library's form, for `mpitrain export`."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

logger = logging.getLogger("mpitrain")


def model_config(model: Any) -> dict[str, Any] | None:
    """Return from what Transformers or timm build a model again; local.

    Args:
        model: Plain, or sharded by `fully_shard`; the library is imported already.
            What is no model of theirs has no configuration.

    Returns:
        What JSON can carry: ``library``; ``files``, the JSON objects by file name that
        the library writes beside the weights; ``tied``, further names of weights.
        ``None`` for a model of no library.
    """
    # fully_shard puts a class of its own before the model's.
    kinds = [it for it in type(model).__mro__ if not it.__name__.startswith("FSDP")]
    is_timm = kinds[0].__module__.startswith("timm.")
    try:
        if any(it.__name__ == "PreTrainedModel" for it in kinds):
            files = _of_transformers(model, kinds[0].__name__)
        elif is_timm and hasattr(model, "pretrained_cfg"):
            files = _of_timm(model)
        else:
            return None
    except Exception as error:  # the library's: no reason to end a training
        reason = f"{type(error).__name__}: {error}"
        logger.warning("export has no --format huggingface of this run: %s", reason)
        return None
    named = dict(model.named_parameters())
    every = model.named_parameters(remove_duplicate=False)
    tied = [name for name, _ in every if name not in named]
    library = "timm" if is_timm else "transformers"
    return {"library": library, "files": files, "tied": tied}


def _of_transformers(model: Any, name: str) -> dict[str, Any]:
    """As `PreTrainedModel.save_pretrained` (5.24)."""
    config = json.loads(model.config.to_json_string()) | {"architectures": [name]}
    files = {"config.json": config}
    if model.can_generate():
        generation = json.loads(model.generation_config.to_json_string())
        files["generation_config.json"] = generation
    return files


def _of_timm(model: nn.Module) -> dict[str, Any]:
    hub: Any = sys.modules["timm.models._hub"]  # what `timm.models.save_for_hf` calls
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        hub.save_config_for_hf(model, str(file))
        return {"config.json": json.loads(file.read_text())}
