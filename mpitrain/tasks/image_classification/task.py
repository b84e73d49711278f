"""The built-in task: transforms, mixing, a head's training, cross-entropy, accuracy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.custom import Samples
from mpitrain.data.loader import Batch, BatchLoader
from mpitrain.data.samples import kind_of
from mpitrain.data.sharding import Indices
from mpitrain.errors import UsageError
from mpitrain.models.layers import head_of
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification import mixing
from mpitrain.tasks.image_classification.datasets.images import RESIZE_RATIO
from mpitrain.tasks.image_classification.datasets.index import ImageReader
from mpitrain.tasks.image_classification.features import features_of
from mpitrain.tasks.image_classification.labels import (
    accuracy,
    check_targets,
    cross_entropy,
)
from mpitrain.tasks.image_classification.transforms import (
    NUM_DIMENSIONS,
    SCALED,
    ImageTransform,
    Statistics,
    imagenet_statistics,
)
from mpitrain.tasks.stages import PROBE, Stage
from mpitrain.tasks.task import Losses, Model, Task, TrainedPart

logger = logging.getLogger("mpitrain")


class ImageClassification(Task):
    """Pairs of inputs and labels; what is for images alone leaves others as they are.

    Args:
        mean_std: Mean and standard deviation per channel, in the range 0 to 1, to
            normalize uint8 images `(N, C, H, W)` by; ``None``: inputs are left alone.
        num_classes: Of the data set, to check the number of the model's outputs.
    """

    uses_settings = (
        "image_size",
        "random_crop",
        "random_flip",
        "label_smoothing",
        "mixup",
        "cutmix",
    )

    def __init__(
        self, mean_std: Statistics | None = None, num_classes: int | None = None
    ) -> None:
        super().__init__()
        self.mean_std, self.num_classes = mean_std, num_classes
        self._targets_to_check = {"training", "validation"}

    def set_up(
        self, config: TrainConfig, world: World, train: Samples, val: Samples
    ) -> None:
        """Choose the transforms by the first sample."""
        super().set_up(config, world, train, val)
        self.prepends_partner = mixing.is_mixing(config)
        if train.may_skip:
            mixing.refuse_mixing(
                config,
                "needs the samples of a step beforehand; it does not work with "
                "iterable data or --on-bad-sample skip",
            )
        example = train.example()
        images, targets = example.inputs, example.targets
        is_bytes = getattr(images, "dtype", None) == torch.uint8
        is_bytes = is_bytes and images.ndim == NUM_DIMENSIONS
        self._set_statistics(images, is_bytes=is_bytes)
        self.inputs = _describe_inputs(train, self.mean_std, config.image_size)
        mean, std = self.mean_std or ((), ())
        augmented = ImageTransform(
            dtype=self.dtype,
            seed=config.seed,
            mean=mean,
            std=std,
            size=config.image_size,
            border=config.random_crop,
            flip=config.random_flip,
            channels_last=config.uses_channels_last(world.device),
        )
        self._transforms = {True: augmented, False: augmented.deterministic()}
        is_random = not augmented.is_deterministic
        if is_random and getattr(targets, "ndim", 1) >= NUM_DIMENSIONS:
            raise UsageError(
                "--random-crop and --random-flip change the images alone, and the "
                f"targets are images, too, {tuple(targets.shape[1:])}; expected "
                "labels. Change both in a custom data set"
            ).on_all_ranks()

    def _set_statistics(self, images: Any, *, is_bytes: bool) -> None:
        config = self.config
        is_imagenet = config.normalize == "imagenet"
        if not is_bytes:
            if (self.mean_std or is_imagenet) and self.world.is_rank_zero:
                logger.warning(
                    "the inputs are %s, and are not normalized: mean_std and "
                    "--normalize are for uint8 images (N, C, H, W); normalize them in "
                    "the data set",
                    kind_of(images),
                )
            self.mean_std = None
        elif self.mean_std is None and is_imagenet:
            self.mean_std = imagenet_statistics(images.shape[1])
        elif self.mean_std is None and any(
            (config.image_size, config.random_crop, config.random_flip)
        ):
            self.mean_std = SCALED

    def transform(
        self, inputs: Any, indices: Indices, epoch: int, *, is_training: bool
    ) -> Any:
        """Crop, flip, normalize and resize images."""
        if isinstance(inputs, Tensor):
            return self._transforms[is_training](inputs, indices, epoch)
        return super().transform(inputs, indices, epoch, is_training=is_training)

    # --- steps --------------------------------------------------------------------

    def training_step(self, model: Model, batch: Batch) -> Losses:
        """Return the loss of each sample; with mixup and cutmix of mixed images."""
        mix = mixing.draw_mix(self.config, batch.epoch, batch.step, batch.inputs)
        if mix is None:
            return super().training_step(model, batch)
        outputs = model(mix.apply(batch.inputs))  # which have the partners in front
        own_loss = self.loss(outputs, batch.targets[1:])
        partners = self.loss(outputs, batch.targets[:-1])
        if not (isinstance(own_loss, Tensor) and isinstance(partners, Tensor)):
            raise UsageError(
                "--mixup and --cutmix mix losses of one value per sample; expected "
                "neither weights nor several losses"
            ).on_all_ranks()
        return mix.weight * own_loss + (1 - mix.weight) * partners

    def refuse_other_step(self) -> None:
        """Refuse a `Trainer.compute_loss` that does not mix."""
        mixing.refuse_mixing(
            self.config,
            "is done in Trainer.compute_loss: call super().compute_loss(batch) "
            "in yours, or leave out the flag",
        )

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the cross-entropy of each sample.

        Args:
            outputs: Of the model, `(N, num_classes)`.
            targets: Labels, int64 `(N,)`, or probabilities, `(N, num_classes)`.
        """
        is_training = torch.is_grad_enabled()
        part = "training" if is_training else "validation"
        if part in self._targets_to_check:
            self._targets_to_check.remove(part)
            check_targets(outputs, targets, self.num_classes)
        smoothing = self.config.label_smoothing if is_training else 0.0
        return cross_entropy(outputs, targets, smoothing)

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Return the accuracy."""
        return {"accuracy": accuracy(outputs, targets)}

    # --- stages -------------------------------------------------------------------

    def start_stage(
        self,
        stage: Stage,
        model: nn.Module,
        loaders: tuple[BatchLoader, BatchLoader],
        ranks: Communicator,
        batch_size: int | None,
    ) -> TrainedPart:
        """Return the model; in a probe its head, on the features of a frozen rest.

        They are computed once, if they are the same in each epoch.
        """
        if stage.name != PROBE or stage.trainable is not None:
            return super().start_stage(stage, model, loaders, ranks, batch_size)
        prefix, head = head_of(model)
        model.requires_grad_(False)
        head.requires_grad_(True)
        is_fixed = self._transforms[True].is_deterministic and not self.prepends_partner
        sets = [loader.samples for loader in loaders]
        features = None
        if batch_size is not None and is_fixed and all(map(_is_fixed, sets)):
            features = features_of(model, loaders, self.world, ranks, batch_size)
        if features is None:
            return TrainedPart(model=model, head=head)
        train, val = features
        return TrainedPart(
            model=head, prefix=prefix + ".", head=head, samples=(train, val)
        )


def _is_fixed(samples: Samples) -> bool:
    """Whether all samples are known, and the same in each epoch."""
    is_known = samples.num_samples is not None and not samples.may_skip
    return is_known and samples.is_deterministic


def _describe_inputs(
    samples: Samples, mean_std: Statistics | None, image_size: int | None
) -> dict[str, Any]:
    """Return what a model is given and its outputs mean, for `inputs.json`."""
    files: Any = getattr(samples, "dataset", None)
    is_cropped = isinstance(files, ImageReader) and not files.keeps_images
    crop = files.image_size if is_cropped else None
    return {
        "mean": mean_std and list(mean_std[0]),
        "std": mean_std and list(mean_std[1]),
        "resize": round(crop * RESIZE_RATIO) if crop else image_size,
        "center_crop": crop,
        "classes": list(samples.classes) or None,
    }
