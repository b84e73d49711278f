"""What a training is done with: plan, feeds, replica, optimizer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mpitrain.data.memory import InMemory
from mpitrain.data.own import as_samples
from mpitrain.data.pixels import NUM_DIMENSIONS, Pixels, of_imagenet
from mpitrain.data.randomness import seed_of_rank
from mpitrain.data.samples import Samples
from mpitrain.data.sharding import Share
from mpitrain.errors import UsageError, agreed
from mpitrain.launch.shared import all_ranks
from mpitrain.models.head import head_of
from mpitrain.record.events import Progress
from mpitrain.train import mixing
from mpitrain.train.evaluate import BATCH_SIZE, Evaluation, Values, evaluate
from mpitrain.train.features import features_of
from mpitrain.train.feed import Feed, Step
from mpitrain.train.fitting import largest_micro_batch
from mpitrain.train.nonfinite import Watch
from mpitrain.train.optim import build_optimizer
from mpitrain.train.plan import Plan, Stage
from mpitrain.train.steps import SoFar
from mpitrain.train.strategy import (
    BatchNorm,
    Replica,
    casting,
    chosen_strategy,
    is_channels_last,
    on_cpu,
    prepared,
    prove_reductions,
)
from mpitrain.train.update import LossScale, Updater
from mpitrain.world import World

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")

DEVICE_SHARE = 0.3
"""How much of a GPU's free memory a data set may take."""


class Setup:
    """All that a training needs.

    Collective over the default group, and so are its methods unless they say otherwise.

    Args:
        trainer: Has model, data and configuration.
        world: Where this process stands.

    Attributes:
        plan: Stages, epochs and steps.
        strategy: How the model is spread, once all of it learns.
        replica: The model of the present stage, spread over the ranks.
        updater: Its optimizer.
        stage: The present stage.
        feed: What it is trained on.
        val_feed: What it is judged by.
        watch: Who looks for losses that are no numbers.
        statistics: What is taken off images; ``None``: nothing.
    """

    stage: Stage
    replica: Replica
    updater: Updater
    feed: Feed
    val_feed: Feed

    def __init__(self, trainer: Trainer, world: World) -> None:
        config = trainer.config
        self.world = world
        self._config = config
        self._trainer = trainer
        self._is_mixed = False
        self._ranks = all_ranks(world)
        self.strategy = chosen_strategy(config, world)
        prove_reductions(self.strategy, config, world, self._ranks)
        self._train, self._val = (
            self._samples(data, what)
            for data, what in (
                (trainer.train_data, "the training data"),
                (trainer.val_data, "the validation data"),
            )
        )
        if self._train.may_lack:
            mixing.refuse_to_mix(
                config,
                "wants to know all samples of a step beforehand; it cannot be had with "
                "iterable data or --on-bad-sample skip",
            )
        self._refuse_other_models(trainer.model)
        self._model = prepared(trainer.model, world, config)
        self._learns = [w.requires_grad for w in self._model.parameters()]
        example = self._train.example()
        statistics = trainer.statistics
        images = example.inputs
        is_bytes = getattr(images, "dtype", None) == torch.uint8
        if statistics is None and config.normalize == "imagenet" and is_bytes:
            statistics = of_imagenet(images.shape[1])
        self.statistics = statistics
        self._pixels = Pixels(
            dtype=torch.float64 if config.precision == "fp64" else torch.float32,
            seed=config.seed,
            mean=statistics[0] if statistics else None,
            std=statistics[1] if statistics else None,
            size=config.image_size,
            border=config.random_crop,
            flip=config.random_flip,
            channels_last=is_channels_last(world, config),
        )
        targets = example.targets
        if not self._pixels.is_still and getattr(targets, "ndim", 1) >= NUM_DIMENSIONS:
            raise agreed(
                UsageError(
                    "--random-crop and --random-flip change the images alone, and the "
                    f"targets are images, too, {tuple(targets.shape[1:])}; expected "
                    "labels. Change both in a data set of your own"
                )
            )
        has_batch_norm = any(isinstance(m, BatchNorm) for m in self._model.modules())
        self._least_rows = 2 if has_batch_norm else 1
        self._head: nn.Module | None = None
        self._on_features = False
        self._others: list[Feed] = []
        micro = config.micro_batch_size
        if micro == "auto":
            feed = self._feed(self._train, train=True)
            micro = largest_micro_batch(trainer, self._model, feed, world, self._ranks)
        self.plan = Plan(
            num_samples=self._train.num_samples,
            world_size=world.world_size,
            config=config,
            micro_batch_size=micro,
        )
        self.watch = Watch(world, config.on_nonfinite)
        torch.manual_seed(seed_of_rank(config.seed, world.rank))  # of dropout

    def begin(self, stage: Stage) -> None:
        """Make ready for a stage."""
        config, model = self._config, self._model
        self.stage = stage
        self._head = head_of(model)[1] if stage.name == "probe" else None
        for weight, learns in zip(model.parameters(), self._learns, strict=True):
            weight.requires_grad_(learns and self._head is None)
        strategy = self.strategy
        trained = model
        train, val = self._train, self._val
        self._on_features = False
        if self._head is not None:
            self._head.requires_grad_(True)
            strategy = "ddp" if strategy == "fsdp" else strategy
            features = self._features() if self._is_still else None
            if features is not None:
                trained = self._head
                train, val = features[0], features[1]
            self._on_features = features is not None
        self.feed = self._feed(train, train=True)
        self.val_feed = self._feed(val, train=False)
        self.replica = Replica(
            trained,
            self.world,
            config,
            strategy,
            all_used=self._trainer.all_weights_used or self._on_features,
        )
        optimizer = build_optimizer(
            trained.parameters(),
            config,
            lr=config.peak_lr * stage.lr_factor,
            shard=config.shard_optimizer and self.world.world_size > 1,
        )
        scale = LossScale(self.world.world_size, is_used=config.precision == "fp16")
        self.updater = Updater(self.replica, optimizer, config, scale)

    def train_mode(self) -> None:
        """Let the parts that learn be in the mode for training; local."""
        if self._head is not None:
            self._model.eval()
            self._head.train()
        else:
            self._model.train()

    @property
    def model(self) -> nn.Module:
        """The whole model, in the form asked for."""
        return self._model

    @property
    def prefix(self) -> str:
        """What the names of the replica's weights have before them in the model."""
        return head_of(self._model)[0] + "." if self._on_features else ""

    def steps_of(self, so_far: SoFar) -> Iterator[Step]:
        """Yield this rank's part of every step of an epoch that is not yet done.

        Raises:
            UsageError: Nobody has asked `mix_of` in a step that mixes; on every rank.
        """
        epoch = so_far.epoch
        samples = self.feed.samples
        order = None
        if samples.num_samples is not None:
            order = samples.order(self._config.seed, epoch)
        share = self.plan.share_of(
            self.world.rank, order, with_partner=mixing.mixes(self._config)
        )
        share = dataclasses.replace(
            share, first_step=so_far.epoch_steps, taken=tuple(so_far.taken)
        )
        for step in self.feed.steps(share, epoch):
            yield step
            if not self._is_mixed:
                mixing.refuse_to_mix(
                    self._config,
                    "is done in Trainer.step: call super().step(batch) in your own, or "
                    "take the flag off",
                )

    def mix_of(self, epoch: int, step: int, inputs: Any) -> mixing.Mix | None:
        """Return how the samples of a step are mixed; local."""
        if not mixing.mixes(self._config):
            return None
        if not isinstance(inputs, torch.Tensor) or inputs.ndim != NUM_DIMENSIONS:
            mixing.refuse_to_mix(self._config, "is for images, found other inputs")
        self._is_mixed = True
        height, width = inputs.shape[-2:]
        return mixing.drawn(self._config, epoch, step, (height, width))

    def gpu_bytes(self) -> int:
        """Return the most memory of its GPU that this rank has held; 0 without one."""
        if self.world.device == "cpu":
            return 0
        return int(torch.cuda.max_memory_allocated(self.world.device))

    def count_taken(self) -> list[int]:
        """Return how many samples all ranks have taken of each part, since last asked.

        Empty where they read no parts. Collective over the default group, else.
        """
        num = self.feed.num_parts
        if not num:
            return []
        mine = torch.zeros(num, dtype=torch.int64)
        for part, count in self.feed.taken.items():
            mine[part] = count
        self.feed.taken.clear()
        mine = mine.to(self.world.device)
        dist.all_reduce(mine)
        return mine.tolist()

    def evaluate(
        self, feed: Feed, values: Values, progress: Progress | None = None
    ) -> Evaluation:
        """Judge the model, or the average of its weights, on every sample of a feed."""
        self._model.eval()
        num = feed.samples.num_samples
        share = Share(
            rank=self.world.rank,
            world_size=self.world.world_size,
            global_batch_size=self._rows_at_once * self.world.world_size,
            order=None if num is None else np.arange(num, dtype=np.int64),
        )
        is_whole = self._on_features and feed is not self.val_feed
        through = self._model if is_whole else None
        forward = functools.partial(self.replica.forward, through=through)
        with self.updater.averaged():
            self.replica.synchronize_buffers()
            told = progress or self._trainer.progress
            try:
                return evaluate(forward, feed, share, values, told)
            except BaseException:
                feed.skipped.clear()  # who goes on evaluates all of it again
                raise

    def feed_of(self, data: Any) -> Feed:
        """Return a feed of another set to judge the model by, such as a test set."""
        feed = self._feed(self._samples(data, "the test data"), train=False)
        self._others.append(feed)
        return feed

    def count_skipped(self) -> int:
        """Return how many samples were left out by all ranks since the last call."""
        mine = 0
        feeds = (self.feed, self.val_feed, *self._others)
        for feed in feeds:
            for words in feed.skipped:
                logger.info("left out: %s", words)  # in this rank's log
            mine += len(feed.skipped)
            feed.skipped.clear()
        if not any(feed.samples.may_lack for feed in feeds):
            return 0
        count = torch.tensor(float(mine), device=self.world.device)
        dist.all_reduce(count)
        return int(count)

    def whole_state(self) -> dict[str, Any]:
        """Return the model's plain ``state_dict`` on the CPU; of use on rank zero."""
        with self.updater.averaged():
            if not self._on_features:
                return self.replica.whole_state()
            return on_cpu(self._model.state_dict())

    def close(self) -> None:
        """End the processes that read ahead, and let all learn that may; local."""
        self._train.close()
        self._val.close()
        for weight, learns in zip(self._model.parameters(), self._learns, strict=True):
            weight.requires_grad_(learns)

    def _refuse_other_models(self, model: nn.Module) -> None:
        """Make sure that the model can be trained, and is one on all ranks.

        Raises:
            UsageError: It is spread already.
            DataError: It differs in names or shapes; on every rank or on none.
        """
        if any(hasattr(weight, "full_tensor") for weight in model.parameters()):
            raise agreed(
                UsageError(
                    "the model's weights are sharded already, by an earlier `fit` with "
                    "fsdp; expected a model that is whole. Make a new one, and load "
                    "trainer.state_dict() into it"
                )
            )
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        self._ranks.agree(
            f"{sum(tensor.numel() for _, tensor in tensors)} numbers in {len(tensors)} "
            f"tensors (names and shapes {digest})",
            "the model",
            "Expected the same on every rank; its first weights are rank zero's",
        )

    @property
    def _rows_at_once(self) -> int:
        """Samples that a rank evaluates at once: no more than it trains on."""
        return min(BATCH_SIZE, self.plan.micro_batch_size or BATCH_SIZE)

    @property
    def _is_still(self) -> bool:
        """Whether each epoch sees the same inputs."""
        sets = (self._train, self._val)
        return (
            self._pixels.is_still
            and not mixing.mixes(self._config)
            and all(samples.is_still for samples in sets)
        )

    def _features(self) -> list[InMemory] | None:
        if not self._trainer.has_plain_step:
            return None  # it may want the inputs themselves
        feeds = [self._feed(data, train=False) for data in (self._train, self._val)]
        with casting(self._config, self.world):
            return features_of(
                self._model,
                feeds,
                self.world,
                self._ranks,
                self._trainer.progress,
                self._rows_at_once,
            )

    def _samples(self, data: Any, what: str) -> Samples:
        config = self._config
        samples = as_samples(
            data,
            what,
            seed=config.seed,
            world=self.world,
            ranks=self._ranks,
            num_workers=0 if config.num_workers == "auto" else config.num_workers,
            skip=config.on_bad_sample == "skip",
        )
        if self.world.device == "cpu" or not isinstance(samples, InMemory):
            return samples
        free, _ = torch.cuda.mem_get_info(self.world.device)
        on_node = self.world.nodes[self.world.node_rank].gpus
        sharing = on_node.count(on_node[self.world.local_rank]) if on_node else 1
        fits = samples.num_bytes * sharing < DEVICE_SHARE * free
        return samples.to(self.world.device) if fits else samples

    def _feed(self, samples: Samples, *, train: bool) -> Feed:
        pixels = self._pixels if train else self._pixels.still()
        least = self._least_rows if train else 1
        return Feed(samples, self.world, pixels, least_rows=least)
