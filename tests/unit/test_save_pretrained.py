"""What Transformers' `save_pretrained` writes goes into its models, also renamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_export_folders import write
from torch import nn

from mpitrain.errors import DataError
from mpitrain.models.model_config import model_config
from mpitrain.models.weights import load_weights
from mpitrain.tools.export import ExportConfig, export

transformers: Any = pytest.importorskip("transformers")

WIDTH: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2}
TEXT = WIDTH | {"vocab_size": 64, "num_hidden_layers": 2, "intermediate_size": 32}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
EXPERTS = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
IMAGES = WIDTH | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
IMAGES |= {"num_labels": 3}

KINDS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": TEXT | {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": TEXT | EXPERTS | {"num_experts": 4},
    "LlamaForCausalLM": TEXT | {"tie_word_embeddings": True},
    "ViTForImageClassification": IMAGES | {"intermediate_size": 16},
    "Dinov2ForImageClassification": IMAGES,
    "ViTModel": IMAGES | {"intermediate_size": 16},
}


def build(kind: str, seed: int, **others: Any) -> nn.Module:
    family = kind.partition("For")[0].removesuffix("Model")
    config = getattr(transformers, f"{family}Config")
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, kind)(config(**KINDS[kind] | others))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_what_save_pretrained_writes_is_loaded(kind: str, tmp_path: Path) -> None:
    source, model = build(kind, 1), build(kind, 2)
    source.save_pretrained(tmp_path)  # type: ignore[operator]
    before = torch.get_rng_state()
    line = load_weights(model, tmp_path)
    assert "new" not in line
    assert "not used" not in line
    assert torch.equal(torch.get_rng_state(), before)
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_another_number_of_classes_leaves_the_head_out(tmp_path: Path) -> None:
    kind = "ViTForImageClassification"
    source, model = build(kind, 1), build(kind, 2, num_labels=5)
    source.save_pretrained(tmp_path)  # type: ignore[operator]
    head = model.classifier.weight.clone()  # type: ignore[operator, union-attr]
    line = load_weights(model, tmp_path)
    assert line.endswith("; classifier new (5 classes instead of 3)")
    assert torch.equal(model.classifier.weight, head)  # type: ignore[arg-type, union-attr]
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        if not name.startswith("classifier."):
            assert torch.equal(tensor, expected[name]), name


def test_those_of_another_size_are_refused(tmp_path: Path) -> None:
    kind = "ViTForImageClassification"
    build(kind, 1).save_pretrained(tmp_path)  # type: ignore[operator]
    deeper = build(kind, 2, num_hidden_layers=2)
    before = {name: it.clone() for name, it in deeper.state_dict().items()}
    with pytest.raises(DataError, match=r"not those of this ViT.* missing \(vit\."):
        load_weights(deeper, tmp_path)
    wider = build(kind, 2, hidden_size=32)
    with pytest.raises(DataError, match=r"of another shape \(.*vit\..* expected"):
        load_weights(wider, tmp_path)
    for name, tensor in deeper.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_export_gets_the_names_of_save_pretrained_as_the_page_says(
    tmp_path: Path,
) -> None:
    source: Any = build("MixtralForCausalLM", 1)
    source.save_pretrained(tmp_path / "theirs")
    write(tmp_path, source.state_dict(), model_config=model_config(source))
    folder = tmp_path / "folder"
    export(ExportConfig(run=tmp_path, output=folder, format="huggingface"))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.save_pretrained(tmp_path / "other")
    files = (tmp_path / name / "model.safetensors" for name in ("theirs", "other"))
    expected, written = map(load_file, files)
    assert written.keys() == expected.keys()
    assert all(torch.equal(it, expected[name]) for name, it in written.items())
