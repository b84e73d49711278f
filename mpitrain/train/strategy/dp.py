"""One process for several GPUs: `torch.nn.DataParallel`."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel

from mpitrain.train.strategy.base import Strategy


class DPStrategy(Strategy):
    """Spreads each batch over the GPUs of this process."""

    name = "dp"

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = True) -> None:
        """Wrap the model in `DataParallel`."""
        super().wrap(model, find_unused_parameters=find_unused_parameters)
        self.module = DataParallel(model)
