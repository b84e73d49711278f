"""What people train with, on the mpi4py backend: the same results as on gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transports
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mpitrain.backend  # noqa: F401 - registers it
from mpitrain.mpi.world import World

pytestmark = pytest.mark.mpi

NUM_STEPS = 4


def make_group(backend: str) -> dist.ProcessGroup:
    return dist.new_group(backend=backend, timeout=timedelta(seconds=60))


@pytest.fixture(scope="module", params=["as-it-is", "two-nodes"])
def groups(
    world: World, request: pytest.FixtureRequest
) -> Iterator[dict[str, dist.ProcessGroup]]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "two-nodes":
            transports.on_two_nodes(patch, world.rank)
        yield {backend: make_group(backend) for backend in ("mpi4py", "gloo")}


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8)).double()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(128, 8)),
    ).double()


def batch(world: World, step: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + world.rank)
    inputs = torch.randn(6, *shape, generator=random, dtype=torch.float64)
    return [inputs, torch.randint(0, 8, (6,), generator=random)]


def losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    shape: tuple[int, ...] = (20,),
) -> list[float]:
    found = []
    for step in range(NUM_STEPS):
        inputs, labels = batch(world, step, shape)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).double(), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Way = Callable[[dist.ProcessGroup, World], list[float]]


def ddp(group: dist.ProcessGroup, world: World) -> list[float]:
    model = DistributedDataParallel(perceptron(), process_group=group)
    return losses(model, sgd(model), world)


def ddp_in_many_buckets(group: dist.ProcessGroup, world: World) -> list[float]:
    model = DistributedDataParallel(
        perceptron(), process_group=group, bucket_cap_mb=0.001
    )
    return losses(model, sgd(model), world)


def ddp_with_a_hook(group: dist.ProcessGroup, world: World) -> list[float]:
    model = DistributedDataParallel(perceptron(), process_group=group)
    model.register_comm_hook(group, bf16_compress_hook)
    return losses(model, sgd(model), world)


def ddp_of_a_cnn(group: dist.ProcessGroup, world: World) -> list[float]:
    model = DistributedDataParallel(cnn(), process_group=group)
    return losses(model, sgd(model), world, (1, 8, 8))


def ddp_with_uneven_inputs(group: dist.ProcessGroup, world: World) -> list[float]:
    model = DistributedDataParallel(perceptron(), process_group=group)
    optimizer, found = sgd(model), []
    with model.join():
        for step in range(1 + world.rank % 3):
            inputs, labels = batch(world, step, (20,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def zero(group: dist.ProcessGroup, world: World) -> list[float]:
    model = DistributedDataParallel(perceptron(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.Adam,
        process_group=group,
        lr=0.01,
    )
    return losses(model, optimizer, world)


def fsdp(group: dist.ProcessGroup, world: World) -> list[float]:
    model = perceptron()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses(model, sgd(model), world)


def fsdp_in_bf16(group: dist.ProcessGroup, world: World) -> list[float]:
    model = perceptron().float()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
    found = []
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        inputs, labels = batch(world, step, (20,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.float()).float(), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


WAYS: list[Way] = [
    ddp,
    ddp_in_many_buckets,
    ddp_with_a_hook,
    ddp_of_a_cnn,
    ddp_with_uneven_inputs,
    zero,
    fsdp,
    fsdp_in_bf16,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore")  # of torch's own, on its way
def test_it_learns_what_gloo_learns(
    groups: dict[str, dist.ProcessGroup], world: World, way: Way
) -> None:
    found = {name: way(group, world) for name, group in groups.items()}
    loose = 2e-2 if "bf16" in way.__name__ or "hook" in way.__name__ else 1e-9
    assert found["mpi4py"] == pytest.approx(found["gloo"], rel=loose)


@pytest.mark.filterwarnings("ignore")
def test_shards_in_rows_and_copies_in_columns(world: World) -> None:
    """FSDP2 on a mesh of two dimensions: hybrid sharding."""
    if world.world_size % 2:
        return
    found = {}
    for backend in ("mpi4py", "gloo"):
        rows = torch.arange(world.world_size).view(2, -1)
        both = []
        for lines in (rows.t(), rows):  # copies of one shard; shards of one copy
            made = [dist.new_group(line.tolist(), backend=backend) for line in lines]
            both.append(
                next(g for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER)
            )
        mesh = DeviceMesh.from_group(
            both, "cpu", rows, mesh_dim_names=("replicate", "shard")
        )
        model = perceptron()
        fully_shard(model, mesh=mesh)
        found[backend] = losses(model, sgd(model), world)
    assert found["mpi4py"] == pytest.approx(found["gloo"], rel=1e-9)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_come_back(
    groups: dict[str, dist.ProcessGroup], world: World, is_async: bool
) -> None:
    group = groups["mpi4py"]
    shared = [tempfile.mkdtemp() if world.is_rank_zero else ""]
    dist.broadcast_object_list(shared, 0, group=group)
    folder = Path(shared[0])
    model = perceptron()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    losses(model, sgd(model), world)
    state = {"model": model.state_dict()}
    if is_async:
        dcp.async_save(
            state, checkpoint_id=folder, process_group=make_group("mpi4py")
        ).result()
    else:
        dcp.save(state, checkpoint_id=folder, process_group=group)
    dist.barrier(group=group)
    other = perceptron()
    fully_shard(other, mesh=DeviceMesh.from_group(group, "cpu"))
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    other.load_state_dict(state["model"])
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    for one, same in pairs:
        torch.testing.assert_close(one.full_tensor(), same.full_tensor())
