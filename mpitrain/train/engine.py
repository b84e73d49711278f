"""What a training works with: data, plan, parallelized model and optimizer."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from mpitrain.config import TrainConfig
from mpitrain.data.custom import Samples, build_samples, describe_inputs
from mpitrain.data.in_memory import InMemory
from mpitrain.data.randomness import rank_seed
from mpitrain.data.sharding import MicroBatchAssignment, RankShard
from mpitrain.data.transforms import (
    NUM_DIMENSIONS,
    SCALED,
    ImageTransform,
    Statistics,
    imagenet_statistics,
)
from mpitrain.errors import UsageError
from mpitrain.models.layers import head_of
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World
from mpitrain.train import mixing
from mpitrain.train.checks import kind_of
from mpitrain.train.evaluate import Evaluation, MetricsFn, evaluate
from mpitrain.train.features import features_of
from mpitrain.train.loader import Batch, BatchLoader, RankStep
from mpitrain.train.metrics import TrainState
from mpitrain.train.model import (
    BatchNorm,
    check_same_model,
    copy_to_cpu,
    initialize_lazy,
    is_channels_last,
    keep_statistics,
    prepare_model,
    unwrap_model,
)
from mpitrain.train.optimizer import OptimizerWrapper
from mpitrain.train.plan import Plan, Stage
from mpitrain.train.precision import autocast
from mpitrain.train.strategy.base import Strategy
from mpitrain.train.trained_weights import TrainedWeights

logger = logging.getLogger("mpitrain")

GPU_MEMORY_FRACTION = 0.3  # of a GPU's free memory that a data set may take


class Engine:
    """What a training works with, ready on this rank; the arguments are `Trainer`'s.

    Collective over the default group, and so are its methods unless they say otherwise.
    With ``can_cache_features`` a step calls the model with the inputs and does nothing
    else, so that a frozen backbone need run once only.
    """

    stage: Stage
    optimizer: OptimizerWrapper
    trained_weights: TrainedWeights
    train_loader: BatchLoader
    val_loader: BatchLoader

    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        val_data: Any,
        config: TrainConfig,
        world: World,
        strategy: Strategy,
        *,
        mean_std: Statistics | None = None,
        find_unused_parameters: bool = True,
        can_cache_features: bool = True,
    ) -> None:
        self.world = world
        self.config = config
        self.ranks = communicator(world)
        self._find_unused = config.find_unused_parameters == "always" or (
            config.find_unused_parameters == "auto" and find_unused_parameters
        )
        self._can_cache_features = can_cache_features
        self._check_config()
        self.strategy = self._whole_strategy = strategy
        self._train = self._samples(train_data, "the training data")
        self._val = self._samples(val_data, "the validation data")
        self.num_samples = {
            "train": self._train.num_samples,
            "val": self._val.num_samples,
        }
        if self._train.may_skip:
            mixing.refuse_mixing(
                config,
                "needs the samples of a step beforehand; it does not work with "
                "iterable data or --on-bad-sample skip",
            )
        self._set_up_pixels(mean_std)
        model = unwrap_model(model, world)
        if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
            example = self._loader(self._train, train=False).example()
            initialize_lazy(model.to(world.device), example.inputs)
        check_same_model(model, self.ranks)
        self.model = prepare_model(model, world, config)
        named = self.model.named_parameters()
        self._trainable = {name: weight.requires_grad for name, weight in named}
        # Such as batch norm that the user has frozen; a whole model in eval() is not.
        modules = self.model.modules() if self.model.training else ()
        self._in_eval_mode = [module for module in modules if not module.training]
        has_batch_norm = any(isinstance(m, BatchNorm) for m in self.model.modules())
        for samples in (self._train, self._val):
            strategy.check(samples, self.model)
        self._min_rows = 2 if has_batch_norm else 1
        size = config.global_batch_size
        self._max_rows = strategy.max_rows(min(size, self._train.num_samples or size))
        self._head: nn.Module | None = None
        self._on_features = False
        self._test_loaders: list[BatchLoader] = []
        self.plan = Plan(
            num_samples=self._train.num_samples,
            world_size=world.world_size,
            config=config,
        )
        torch.manual_seed(rank_seed(config.seed, world.rank))  # of dropout

    # --- stages -------------------------------------------------------------------

    def start_stage(self, stage: Stage) -> None:
        """Choose the weights that are trained, parallelize them, make an optimizer."""
        config, model = self.config, self.model
        if hasattr(self, "trained_weights"):
            self.trained_weights.check()
        self.stage = stage
        self._head = head_of(model)[1] if stage.name == "probe" else None
        for name, weight in model.named_parameters():
            is_trained = self._trainable.get(name, weight.requires_grad)
            weight.requires_grad_(is_trained and self._head is None)
        self.strategy, trained, features = self._whole_strategy, model, None
        if self._head is not None:
            self._head.requires_grad_(True)
            self.strategy = self._whole_strategy.for_head()
            features = self._compute_features()
            trained = model if features is None else self._head
        if not any(weight.requires_grad for weight in trained.parameters()):
            raise UsageError(
                "the model has no weight that requires a gradient; expected at least "
                "one to train"
            ).on_all_ranks()
        self._on_features = features is not None
        train, val = features or (self._train, self._val)
        self.train_loader = self._loader(train, train=True)
        self.val_loader = self._loader(val, train=False)
        self.strategy.wrap(
            trained, find_unused_parameters=self._find_unused and not self._on_features
        )
        lr = config.peak_lr * stage.lr_factor
        self.optimizer = OptimizerWrapper(self.strategy, config, lr)
        self.trained_weights = TrainedWeights(
            model, self.optimizer, self.strategy.reshard
        )

    def train_mode(self) -> None:
        """Put the parts that are trained into training mode; local."""
        if self._head is not None:
            self.model.eval()
            self._head.train()
            return
        self.model.train()
        for module in self._in_eval_mode:
            module.eval()

    @property
    def prefix(self) -> str:
        """The prefix, in the whole model, of the names of ``strategy.model``."""
        return head_of(self.model)[0] + "." if self._on_features else ""

    def _compute_features(self) -> list[InMemory] | None:
        """Return the head's inputs for all samples, if they are the same each epoch."""
        sets = (self._train, self._val)
        if (
            not self._can_cache_features
            or self.strategy.micro_batches_are_fixed
            or not self._pixels.is_deterministic
            or mixing.is_mixing(self.config)
            or not all(it.is_deterministic and not it.may_skip for it in sets)
            or any(samples.num_samples is None for samples in sets)
        ):
            return None
        loaders = [self._loader(samples, train=False) for samples in sets]
        size = self.strategy.max_evaluation_batch_size
        with autocast(self.config, self.world.device):
            return features_of(self.model, loaders, self.world, self.ranks, size)

    # --- steps --------------------------------------------------------------------

    def start_step(self, lr: float, num_samples: int) -> float:
        """Begin a step; return the factor of the sum of losses."""
        self.optimizer.start_step(lr)
        self.trained_weights.check()
        return self.optimizer.scale.value / num_samples

    def steps(self, state: TrainState) -> Iterator[RankStep]:
        """Yield this rank's part of the steps of the epoch that are not done yet."""
        samples = self.train_loader.samples
        order = None
        if samples.num_samples is not None:
            order = samples.order(self.config.seed, state.epoch)
        is_done = False
        while not is_done:
            assignment = self.strategy.assignment
            rank_shard = RankShard(
                rank=self.world.rank,
                world_size=self.world.world_size,
                global_batch_size=self.config.global_batch_size,
                micro_batch_size=self.strategy.micro_batch_size,
                assignment=assignment,
                order=order,
                first_step=state.epoch_step,
                max_steps=1 if self.config.dry_run else None,
                samples_read_per_shard=tuple(state.samples_per_shard),
                prepends_mixup_partner=mixing.is_mixing(self.config),
            )
            steps = self.train_loader.steps(rank_shard, state.epoch)
            with contextlib.closing(steps):
                for step in steps:
                    yield step
                    if self.strategy.assignment is not assignment:
                        break  # and load the rest as it is cut now
                else:
                    is_done = True

    def norm_statistics(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Return a context for the passes of a micro-batch."""
        # A doubled sample has variance 0: only where there are no others is it counted.
        if self._min_rows == 1 or self._max_rows == 1 or len(batch) > 1:
            return contextlib.nullcontext()
        return keep_statistics(self.strategy.model)

    def take_samples_per_shard(self) -> list[int]:
        """Return the samples of each shard of an iterable set read since the last."""
        loader = self.train_loader
        if not loader.num_shards:
            return []
        mine = torch.zeros(loader.num_shards, dtype=torch.int64)
        for part, count in loader.samples_per_shard.items():
            mine[part] = count
        loader.samples_per_shard.clear()
        mine = mine.to(self.world.device)
        dist.all_reduce(mine)
        return mine.tolist()

    def take_skipped(self) -> int:
        """Return the samples of all ranks not readable since the last call."""
        mine = 0
        loaders = (self.train_loader, self.val_loader, *self._test_loaders)
        for loader in loaders:
            for error in loader.skipped:
                logger.info("skipped: %s", error)  # in this rank's log
            mine += len(loader.skipped)
            loader.skipped.clear()
        if not any(loader.samples.may_skip for loader in loaders):
            return 0
        count = torch.tensor(float(mine), device=self.world.device)
        dist.all_reduce(count)
        return int(count)

    # --- evaluation and results ---------------------------------------------------

    def evaluate(
        self,
        loader: BatchLoader,
        metrics: MetricsFn,
        on_batch_end: Callable[[], object] = lambda: None,
    ) -> Evaluation:
        """Evaluate the model, or its EMA, on every sample of a data set."""
        was_training = any(module.training for module in self.model.modules())
        self.model.eval()
        num, world_size = loader.samples.num_samples, self.world.world_size
        size = self.strategy.evaluation_batch_size(num)
        # Batches do not depend on the number of ranks, which take them in turn. Each
        # rank has as many: callbacks may call collectives after each.
        rank_shard = RankShard(
            rank=self.world.rank,
            world_size=world_size,
            global_batch_size=size * world_size,
            micro_batch_size=size,
            assignment=MicroBatchAssignment(world_size=world_size, is_interleaved=True),
            order=None if num is None else np.arange(num, dtype=np.int64),
        )
        is_whole = self._on_features and loader is not self.val_loader
        forward = functools.partial(
            self.strategy.forward, through=self.model if is_whole else None
        )
        with self.optimizer.ema_weights():
            self.strategy.broadcast_buffers()
            try:
                return evaluate(
                    forward,
                    loader,
                    rank_shard,
                    self.ranks,
                    metrics,
                    self.world.device,
                    on_batch_end,
                    self.strategy.seed_evaluation_batch,
                )
            except BaseException:
                loader.skipped.clear()  # a resumed job evaluates all of it again
                raise
            finally:
                self.strategy.reshard()  # callbacks find the weights of the optimizer
                if was_training:
                    self.train_mode()

    def test_loader(self, data: Any) -> BatchLoader:
        """Return a loader of another data set for `evaluate`."""
        samples = self._samples(data, "the test data")
        self.strategy.check(samples, self.model)
        loader = self._loader(samples, train=False)
        self._test_loaders.append(loader)
        return loader

    def full_state_dict(self) -> dict[str, Any]:
        """Return what `Trainer.state_dict` does."""
        with self.optimizer.ema_weights():
            if not self._on_features:
                return self.strategy.full_state_dict()
            return copy_to_cpu(self.model.state_dict())

    def close(self) -> None:
        """End the worker processes, and make trainable what was; local."""
        tested = (loader.samples for loader in self._test_loaders)
        for samples in (self._train, self._val, *tested):
            samples.close()
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(self._trainable.get(name, weight.requires_grad))

    # --- preparation --------------------------------------------------------------

    def _check_config(self) -> None:
        settings = self.config.as_plain("").items()
        gathered = self.ranks.allgather([f"{name} {value}" for name, value in settings])
        for rank, of_rank in enumerate(gathered):
            for found, expected in zip(of_rank, gathered[0], strict=True):
                if found != expected:
                    raise UsageError(
                        f"the TrainConfig differs between ranks: {expected} on "
                        f"rank 0, {found} on rank {rank}; expected the same on "
                        "every rank"
                    ).on_all_ranks()

    def _set_up_pixels(self, mean_std: Statistics | None) -> None:
        config, example = self.config, self._train.example()
        images, targets = example.inputs, example.targets
        is_bytes = getattr(images, "dtype", None) == torch.uint8
        is_bytes = is_bytes and images.ndim == NUM_DIMENSIONS
        transforms = (config.image_size, config.random_crop, config.random_flip)
        if is_bytes and mean_std is None and config.normalize == "imagenet":
            mean_std = imagenet_statistics(images.shape[1])
        elif is_bytes and mean_std is None and any(transforms):
            mean_std = SCALED
        elif not is_bytes and (mean_std or config.normalize == "imagenet"):
            mean_std = None
            if self.world.is_rank_zero:
                logger.warning(
                    "the inputs are %s, and are not normalized: mean_std and "
                    "--normalize are for uint8 images (N, C, H, W); normalize them in "
                    "the data set",
                    kind_of(images),
                )
        self.mean_std = mean_std
        self.inputs = describe_inputs(self._train, mean_std, config.image_size)
        self._pixels = ImageTransform(
            dtype=torch.float64 if config.precision == "fp64" else torch.float32,
            seed=config.seed,
            mean=mean_std[0] if mean_std else None,
            std=mean_std[1] if mean_std else None,
            size=config.image_size,
            border=config.random_crop,
            flip=config.random_flip,
            channels_last=is_channels_last(self.world, config),
        )
        if (
            not self._pixels.is_deterministic
            and getattr(targets, "ndim", 1) >= NUM_DIMENSIONS
        ):
            raise UsageError(
                "--random-crop and --random-flip change the images alone, and the "
                f"targets are images, too, {tuple(targets.shape[1:])}; expected "
                "labels. Change both in a custom data set"
            ).on_all_ranks()

    def _samples(self, data: Any, what: str) -> Samples:
        config = self.config
        samples = build_samples(
            data,
            what,
            seed=config.seed,
            world=self.world,
            ranks=self.ranks,
            num_workers=0 if config.num_workers == "auto" else config.num_workers,
            skip=config.on_bad_sample == "skip",
        )
        if self.world.device == "cpu" or not isinstance(samples, InMemory):
            return samples
        free, _ = torch.get_device_module(self.world.device).mem_get_info(
            self.world.device
        )
        on_node = self.world.nodes[self.world.node_rank].gpus
        sharing = on_node.count(on_node[self.world.local_rank]) if on_node else 1
        fits = samples.num_bytes * sharing < GPU_MEMORY_FRACTION * free
        return samples.to(self.world.device) if fits else samples

    def _loader(self, samples: Samples, *, train: bool) -> BatchLoader:
        pixels = self._pixels if train else self._pixels.deterministic()
        min_rows = self._min_rows if train else 1
        return BatchLoader(samples, self.world, pixels, min_rows=min_rows)
