"""What loggers are told: numbers by name, the same names for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mpitrain.record.loggers.feeding import Fed, finish_all
from mpitrain.record.loggers.protocol import Images, Logger, Status
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput

SECONDS = ("data", "compute", "communication", "wait", "late")
"""What of a `Pace` is divided by its steps."""


class Loggers:
    """Hands what a training tells on to the loggers of a rank; a `Listener`.

    True if there are any.

    Args:
        loggers: Of this rank; may be none.
        every: Of the steps, those whose number it divides are told.
        step: Steps done before this job.
        want_images: Whether one of them has use for images.
    """

    def __init__(
        self,
        loggers: Sequence[Fed] = (),
        *,
        every: int = 1,
        step: int = 0,
        want_images: bool = False,
    ) -> None:
        self.want_images = want_images
        self._loggers = loggers
        self._every = every
        self._step = step
        self._summary: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def start(self) -> None:
        """Let them begin."""
        for one in self._loggers:
            one.start()

    def rows_done(self, rows: Sequence[StepMetrics]) -> None:
        """Tell of steps."""
        self._step = rows[-1].step
        told = rows
        if self._every > 1:
            told = [row for row in rows if row.step % self._every == 0]
        if not told:
            return

        def tell(logger: Logger) -> None:
            for row in told:
                logger.scalars(row.step, step_values(row))

        for one in self._loggers:
            one.tell(tell, len(told))

    def pace_done(self, pace: Throughput) -> None:
        """Tell how fast steps were."""
        self._tell(pace.step, pace_values(pace))

    def epoch_done(self, epoch: EpochMetrics) -> None:
        """Tell of an epoch."""
        values = epoch_values(epoch)
        self._summary.update(values, epochs=epoch.epoch)
        self._tell(epoch.step, values)

    def test_done(self, values: Mapping[str, float]) -> None:
        """Tell how good the finished model is on the test set."""
        named = {f"test/{name}": value for name, value in values.items()}
        self._summary.update(named)
        self._tell(self._step, named)

    def images(self, name: str, images: Images) -> None:
        """Show images, as they are before the next step."""
        step = self._step
        for one in self._loggers:
            one.tell(lambda logger: logger.images(step, name, images))

    def finish(self, status: Status, progress: Callable[[str], object]) -> None:
        """Let them end, and wait for that, not for long.

        Args:
            status: Whether the training is finished, or stopped.
            progress: Told now and then that this rank is alive.
        """
        finish_all(
            self._loggers,
            status,
            {**self._summary, "steps": self._step},
            lambda: progress("finishing the loggers"),
        )

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        for one in self._loggers:
            one.tell(lambda logger: logger.scalars(step, values))


def step_values(row: StepMetrics) -> dict[str, float]:
    """Name what a step came to.

    >>> step_values(StepMetrics(epoch=1, step=3, loss=0.5, lr=0.1, grad_norm=2.0))
    {'train/loss': 0.5, 'train/lr': 0.1, 'train/gradient_norm': 2.0}
    """
    return {
        "train/loss": row.loss,
        "train/lr": row.lr,
        "train/gradient_norm": row.grad_norm,
    }


def pace_values(pace: Throughput) -> dict[str, float]:
    """Name how fast steps were; seconds are those of one step."""
    values = {
        "pace/samples_per_second": pace.samples_per_second,
        "pace/step_seconds": pace.seconds / pace.num_steps,
    }
    for name in SECONDS:
        values[f"pace/{name}_seconds"] = (
            getattr(pace, f"{name}_seconds") / pace.num_steps
        )
    if pace.gpu_bytes is not None:
        values["gpu/memory_bytes"] = pace.gpu_bytes
    return values


def epoch_values(epoch: EpochMetrics) -> dict[str, float]:
    """Name what an epoch came to."""
    values = {f"val/{name}": value for name, value in epoch.values.items()}
    return {
        "train/epoch": epoch.epoch,
        "train/epoch_loss": epoch.train_loss,
        "train/epoch_seconds": epoch.epoch_seconds,
        **values,
    }
