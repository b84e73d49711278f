"""The averaged prediction of a deep ensemble, after examples/sweeps/ensemble.yaml.

python examples/ensemble.py sweeps/ensemble
"""

import sys
from pathlib import Path

import torch

from mpitrain.models.build import build_model
from mpitrain.tasks.image_classification.datasets.named import digits

data = digits()
inputs, targets = data.val.inputs, data.val.targets
probabilities, accuracies = torch.zeros(len(targets), 10), []
for weights in sorted(Path(sys.argv[1]).glob("trial-*/model.pt")):
    model = build_model("convnet", num_classes=10, in_channels=1, image_size=8, seed=1)
    model.load_state_dict(torch.load(weights, weights_only=True))
    with torch.inference_mode():
        outputs = model.eval()(inputs).softmax(dim=1)
    probabilities += outputs
    accuracies.append((outputs.argmax(dim=1) == targets).float().mean().item())
averaged = (probabilities.argmax(dim=1) == targets).float().mean().item()
mean = sum(accuracies) / len(accuracies)
print(f"{len(accuracies)} models: {mean:.2%} each on average, {averaged:.2%} together")
