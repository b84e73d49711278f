"""Regression with a U-Net: where a field is after wind and diffusion have had it.

mpirun -np 4 --oversubscribe python examples/unet.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mpitrain


def fields(num: int, seed: int, size: int = 32) -> TensorDataset:
    """Draw smooth fields, and blow each one on: exactly, by its Fourier modes."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num, 1, size, size, generator=generator)
    kx, ky = torch.meshgrid(*[torch.fft.fftfreq(size, 1 / size)] * 2, indexing="ij")
    k2 = kx**2 + ky**2
    before = torch.fft.fft2(noise) * torch.exp(-k2 / 32)
    wind = torch.exp(-2j * torch.pi * (0.1 * kx + 0.05 * ky))
    after = before * wind * torch.exp(-k2 / 128)
    before, after = (torch.fft.ifft2(modes).real for modes in (before, after))
    return TensorDataset(before / before.std(), after / before.std())


def convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, padding_mode="circular"),
        nn.GELU(),
        nn.Conv2d(after, after, 3, padding=1, padding_mode="circular"),
        nn.GELU(),
    )


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        first, *deeper = widths
        self.first = convolutions(1, first)
        self.down = nn.ModuleList(map(convolutions, widths, deeper))
        self.up = nn.ModuleList(
            convolutions(low + high, high)
            for low, high in zip(deeper[::-1], widths[-2::-1], strict=True)
        )
        self.last = nn.Conv2d(first, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], dim=1))
        return self.last(x)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(dim=(1, 2, 3))


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"rmse": squared_error(outputs, targets).sqrt()}


def main() -> None:
    torch.manual_seed(1)
    model = UNet()
    trainer = mpitrain.Trainer(
        model,
        train_data=fields(256, seed=1),
        val_data=fields(64, seed=2),
        config=mpitrain.TrainConfig(
            epochs=5, global_batch_size=16, optimizer="adamw", lr=3e-3
        ),
        loss=squared_error,
        metrics=metrics,
    )
    trainer.fit()
    state = trainer.state_dict()  # collective: on all ranks
    if trainer.world.is_rank_zero:
        torch.save(state, "unet.pt")


if __name__ == "__main__":
    main()
