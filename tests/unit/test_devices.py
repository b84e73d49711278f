"""Which GPU is whose: the plan, and what it is made from, as tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpitrain.errors import TopologyError, UsageError
from mpitrain.launch import gpu, pci
from mpitrain.launch.gpu import VisibleGpus
from mpitrain.mpi.world import Node

OURS, NCCL = "mpi4py", "cpu:mpi4py,cuda:nccl"


def nodes_of(*sizes: int) -> tuple[Node, ...]:
    ends = itertools.accumulate(sizes)
    return tuple(
        Node(hostname=f"gpu{i:02}", ranks=tuple(range(end - size, end)))
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


class Plan(NamedTuple):
    """What is planned for all ranks."""

    of_job: gpu.DevicePlan
    devices: list[str]  # by rank
    gpus: list[tuple[str, str]]  # host and number, by rank

    @property
    def shared(self) -> bool:
        """Whether some GPU is used by several ranks."""
        return len(set(self.gpus)) < len(self.gpus)


def plan_devices(
    seen: Sequence[VisibleGpus], nodes: Sequence[Node], **asked: Any
) -> Plan:
    """As the ranks do it together."""
    by_node: dict[gpu.NodeGpus, list[int]] = {}
    for number, node in enumerate(nodes):
        found = gpu.plan_node([seen[rank] for rank in node.ranks])
        by_node.setdefault(found, []).append(number)
    plan = gpu.plan_devices(by_node, nodes, **asked)
    of_nodes = {number: of for of, numbers in by_node.items() for number in numbers}
    return Plan(
        plan,
        [device for number in range(len(nodes)) for device in of_nodes[number].devices],
        [
            (node.hostname, it)
            for i, node in enumerate(nodes)
            for it in of_nodes[i].gpus
        ],
    )


def sees(*uuids: str) -> VisibleGpus:
    return VisibleGpus(gpus=uuids, has_nccl=True)


@pytest.mark.parametrize(
    ("visible", "sizes", "expected", "backend"),
    [
        ([()] * 8, (8,), ["cpu"] * 8, OURS),
        ([("a",)], (1,), ["cuda:0"], NCCL),
        ([("a", "b")] * 2, (2,), ["cuda:0", "cuda:1"], NCCL),
        # Fewer ranks than GPUs.
        ([("a", "b", "c")], (1,), ["cuda:0"], NCCL),
        # Two nodes whose GPUs are others, though each counts from 0.
        ([("a",), ("b",)], (1, 1), ["cuda:0", "cuda:0"], NCCL),
        # --gpus-per-task=1: every rank sees one GPU, its own.
        ([("a",), ("b",)], (2,), ["cuda:0", "cuda:0"], NCCL),
        # A wrapper that gives the ranks of a socket the GPUs of that socket.
        (
            [("a", "b"), ("c", "d")] * 2,
            (4,),
            ["cuda:0", "cuda:0", "cuda:1", "cuda:1"],
            NCCL,
        ),
        # CUDA_VISIBLE_DEVICES differs between the ranks of a node, and overlaps.
        ([("a", "b"), ("b", "a")], (2,), ["cuda:0", "cuda:0"], NCCL),
        ([("a", "b"), ("a",)], (2,), ["cuda:1", "cuda:0"], NCCL),
        # More ranks than GPUs share them.
        ([("a",)] * 8, (8,), ["cuda:0"] * 8, OURS),
        ([("a", "b")] * 3, (3,), ["cuda:0", "cuda:1", "cuda:0"], OURS),
        # Shared on one node only is shared.
        ([("a",), ("b",), ("b",)], (1, 2), ["cuda:0"] * 3, OURS),
    ],
)
def test_the_plan_gives_each_rank_a_device(
    visible: list, sizes: tuple, expected: list, backend: str
) -> None:
    plan = plan_devices([sees(*uuids) for uuids in visible], nodes_of(*sizes))
    assert list(plan.devices) == expected
    assert plan.of_job.backend == backend
    assert plan.shared == (backend == OURS and expected[0] != "cpu")


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("num_gpus", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_any_number_of_ranks_trains_on_any_number_of_gpus(
    num_ranks: int, num_gpus: int, num_nodes: int
) -> None:
    seen = [
        sees(*(f"{node}-{i}" for i in range(num_gpus)))
        for node in range(num_nodes)
        for _ in range(num_ranks)
    ]
    nodes = nodes_of(*[num_ranks] * num_nodes)
    plan = plan_devices(seen, nodes)
    if num_gpus == 0:
        assert (set(plan.devices), plan.of_job.backend) == ({"cpu"}, OURS)
        assert plan.of_job.warning == ""
        return
    for node in nodes:
        # Local rank i takes device i; then it goes round.
        assert [plan.devices[rank] for rank in node.ranks] == [
            f"cuda:{i % num_gpus}" for i in range(num_ranks)
        ]
    load = Counter(plan.gpus)
    assert max(load.values()) == -(-num_ranks // num_gpus)
    assert max(load.values()) - min(load.values()) <= 1
    assert plan.shared == (num_ranks > num_gpus)
    assert plan.of_job.backend == (OURS if plan.shared else NCCL)
    assert bool(plan.of_job.warning) == plan.shared


def test_sharing_says_why_and_what_it_costs() -> None:
    said = plan_devices([sees("a")] * 8, nodes_of(8)).of_job.warning
    assert "up to 8 ranks share a GPU: mpi4py instead of NCCL" in said
    assert "through host memory" in said


def test_fsdp_is_refused_where_gloo_would_end_the_process() -> None:
    from mpitrain.config import TrainConfig
    from mpitrain.mpi.world import World
    from mpitrain.train.strategy.build import choose_strategy

    def choose(backend: str, device: str) -> str:
        world = World(
            rank=0,
            world_size=2,
            node_rank=0,
            local_rank=0,
            local_world_size=2,
            nodes=nodes_of(2),
            device=device,
            backend=backend,
        )
        return choose_strategy(TrainConfig(strategy="fsdp"), world).name

    with pytest.raises(UsageError, match="gloo has no collectives of FSDP for GPUs"):
        choose("gloo", "cuda:0")
    for backend, device in (("gloo", "cpu"), (OURS, "cuda:0"), (NCCL, "cuda:0")):
        assert choose(backend, device) == "fsdp"


def test_without_nccl_it_is_gloo_even_for_a_gpu_each() -> None:
    seen = [VisibleGpus(gpus=(x,), has_nccl=False) for x in "ab"]
    plan = plan_devices(seen, nodes_of(2))
    assert plan.of_job.backend == OURS
    assert "torch has no NCCL here" in plan.of_job.warning


def test_mixed_nodes_are_refused_by_name() -> None:
    with pytest.raises(TopologyError, match="some ranks see a GPU") as caught:
        plan_devices([sees("a"), sees("a"), sees(), sees()], nodes_of(2, 2))
    assert "gpu01: ranks 2-3 of 2-3 see none" in str(caught.value)
    assert "gpu00" not in str(caught.value)
    assert caught.value.reporting_rank == 0
    with pytest.raises(TopologyError, match="gpu00: ranks 0 of 0-1 see none"):
        plan_devices([sees(), sees("a")], nodes_of(2))
    hides = VisibleGpus(hidden="4 of NVIDIA (/dev/nvidia*)")
    with pytest.raises(TopologyError, match=r"see none, but there are 4 of NVIDIA \("):
        plan_devices([sees("a"), hides], nodes_of(1, 1))


def test_cuda_that_is_required_and_missing_is_refused() -> None:
    with pytest.raises(TopologyError, match="torch sees no such GPU on gpu00"):
        plan_devices([VisibleGpus()], nodes_of(1), required="cuda")


def test_the_order_of_ranks_does_not_change_who_shares() -> None:
    """Whatever each rank sees, nobody shares while a GPU that it sees is free."""
    for seen in itertools.permutations([("a",), ("b", "a"), ("c", "a", "b")]):
        plan = plan_devices([sees(*uuids) for uuids in seen], nodes_of(3))
        assert not plan.shared, seen


@pytest.mark.parametrize(
    ("asked", "host", "visible", "backend"),
    [
        ("auto", "gloo", ("a", "b"), "cpu:gloo,cuda:nccl"),
        ("nccl", OURS, ("a", "b"), NCCL),
        ("mpi4py", OURS, ("a", "b"), OURS),
        ("gloo", "gloo", ("a", "b"), "gloo"),
        ("gloo", "gloo", ("a",), "gloo"),
        ("auto", OURS, ("a",), OURS),
    ],
)
def test_the_backend_that_was_asked_for(
    asked: str, host: str, visible: tuple[str, ...], backend: str
) -> None:
    plan = plan_devices(
        [sees(*visible)] * 2, nodes_of(2), asked=asked, host_backend=host
    )
    assert plan.of_job.backend == backend
    assert bool(plan.of_job.warning) == (len(visible) == 1 and asked == "auto")


def test_nccl_is_refused_where_it_cannot() -> None:
    with pytest.raises(TopologyError, match="nccl: up to 2 ranks share a GPU"):
        plan_devices([sees("a")] * 2, nodes_of(2), asked="nccl")
    with pytest.raises(TopologyError, match="--backend nccl asks for one per rank"):
        plan_devices([VisibleGpus()] * 2, nodes_of(2), asked="nccl")


def test_ours_is_refused_where_torch_is_too_old() -> None:
    with pytest.raises(TopologyError, match="--backend mpi4py: torch"):
        gpu.choose_host_backend("mpi4py", "torch 2.11 takes no backend")
    assert gpu.choose_host_backend("auto", "torch is old")[0] == "gloo"
    assert gpu.choose_host_backend("mpi4py", "")[0] == "mpi4py"
    assert gpu.choose_host_backend("nccl", "torch is old")[0] == "gloo"


def test_gpus_that_torch_does_not_see_are_no_silent_training_on_cpus() -> None:
    seen = [VisibleGpus(hidden="4 of NVIDIA (/dev/nvidia*)")] * 2 + [VisibleGpus()] * 2
    with pytest.raises(TopologyError, match="sees no GPU, but there are some") as found:
        plan_devices(seen, nodes_of(2, 2))
    assert "gpu00: 4 of NVIDIA" in str(found.value)
    assert "gpu01" not in str(found.value)
    assert "--device cpu" in str(found.value)
    assert found.value.reporting_rank == 0


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of a machine's /dev and /sys."""

    def make(files: tuple[str, ...], devices: tuple[tuple[str, str], ...]) -> Path:
        for name in files:
            path = tmp_path / "dev" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "nvidia9":  # what a job's cgroup denies cannot be opened
                path.mkdir()
            else:
                path.touch()
        for number, (vendor, kind) in enumerate(devices):
            device = tmp_path / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
            device.mkdir(parents=True)
            (device / "vendor").write_text(f"{vendor}\n")
            (device / "device").write_text(f"{kind}\n")
            (device / "numa_node").write_text(f"{number // 2}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("files", "devices", "found"),
    [
        ((), (), ""),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), (), "2 of NVIDIA"),
        (("nvidia9",), (), ""),
        # MI250X; then the graphics of laptops, whose drivers have the files as well.
        (("kfd",), (("0x1002", "0x740c"),) * 8, "8 of AMD"),
        (("kfd", "dri/renderD128"), (("0x1002", "0x7340"),), ""),
        (("dri/renderD128",), (("0x8086", "0x0bd5"),) * 6, "6 of Intel"),
        (("dri/renderD128",), (("0x8086", "0x9a49"),), ""),
        ((), (("0x1002", "0x740c"),), ""),
    ],
)
def test_the_kernel_tells_gpus_that_compute_and_may_be_opened(
    files: tuple[str, ...],
    devices: tuple[tuple[str, str], ...],
    found: str,
    machine: Callable[..., Path],
) -> None:
    root = machine(files, devices)
    said = pci.hidden_gpus({}, root)
    assert said.startswith(found)
    assert bool(said) == bool(found)
    for value in ("", " ", "-1", "-1,0", "NoDevFiles", "none", "void"):
        assert not pci.hidden_gpus({"CUDA_VISIBLE_DEVICES": value}, root)
    for value in ("0", " 0", "0,1", "GPU-8932f937", "MIG-8932f937", "all", "cuda:0"):
        assert pci.hidden_gpus({"CUDA_VISIBLE_DEVICES": value}, root) == said
    slurm = {"SLURM_JOB_ID": "7"}  # a job that has not been given GPUs
    assert not pci.hidden_gpus(slurm, root)
    assert pci.hidden_gpus({**slurm, "SLURM_JOB_GPUS": "0"}, root) == said


@pytest.mark.parametrize(
    ("files", "devices", "has_gpus"),
    [
        ((), (("0x8086", "0x0bd5"),), False),  # not in this container
        (("nvidiactl",), (), True),
        (("kfd",), (), True),
        (("dri/renderD128",), (("0x8086", "0x0bd5"),), True),
        (("dri/renderD128",), (("0x8086", "0x9a49"), ("0x102b", "0x0538")), False),
    ],
)
def test_a_fork_server_knows_a_machine_with_gpus(
    files: tuple[str, ...],
    devices: tuple[tuple[str, str], ...],
    has_gpus: bool,
    machine: Callable[..., Path],
) -> None:
    assert pci.has_gpus(machine(files, devices)) == has_gpus


def test_numa_nodes_are_those_of_the_kernel(machine: Callable[..., Path]) -> None:
    root = machine((), (("0x10de", "0x20b0"),) * 4)
    nodes = root / "sys/devices/system/node"
    for number, cores in enumerate(("0-3,8-11", "4-7,12")):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}/cpulist").write_text(cores + "\n")
    assert pci.numa_nodes_of({3, 8}, root) == {0}
    assert pci.numa_nodes_of({12}, root) == {1}
    assert pci.numa_nodes_of({0, 4}, root) == {0, 1}
    assert pci.numa_nodes_of({0}, root / "none") == frozenset()
    assert pci.numa_node_of("0000:02:00.0", root) == 1
    assert pci.numa_node_of("0000:07:00.0", root) == -1


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        # Polaris: GPUs and cores count in opposite directions.
        ([{3}, {2}, {1}, {0}], [0, 1, 2, 3]),
        ([{0}, {1}, {2}, {3}], [3, 2, 1, 0]),
        ([{0, 1, 2, 3}] * 4, [0, 1, 2, 3]),  # not bound
        ([set()] * 4, [0, 1, 2, 3]),  # a kernel that does not tell: by index
        ([{3}, {1}], [0, 2]),
        # Two jobs of a node, one on each socket.
        ([{1}, {0}], [2, 3]),
        ([{3}, {2}], [0, 1]),
    ],
)
def test_a_rank_gets_a_gpu_near_its_cores(
    cores: list[set[int]], expected: list[int]
) -> None:
    seen = [
        VisibleGpus(
            gpus=("a", "b", "c", "d"),
            numa_nodes=(3, 2, 1, 0) if any(cores) else (-1,) * 4,
            numa_nodes_of_cores=frozenset(mine),
            has_nccl=True,
        )
        for mine in cores
    ]
    devices = plan_devices(seen, nodes_of(len(seen))).devices
    assert [int(device.partition(":")[2]) for device in devices] == expected


def test_gpus_of_intel_have_their_own_word_and_library() -> None:
    seen = [VisibleGpus(gpus=("a", "b"), kind="xpu", has_nccl=True)] * 2
    plan = plan_devices(seen, nodes_of(2))
    assert plan.devices == ["xpu:0", "xpu:1"]
    assert plan.of_job.backend == "cpu:mpi4py,xpu:xccl"
    for wrong in ({"required": "cuda"}, {"asked": "nccl"}):
        with pytest.raises(TopologyError, match="sees no such GPU on gpu00, but --"):
            plan_devices(seen, nodes_of(2), **wrong)  # type: ignore[arg-type]


def test_caches_of_kernels_are_in_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = gpu.cache_variables("node1")
    folder = Path(found["TRITON_CACHE_DIR"]).parent
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert gpu.cache_variables("node1") == found
    assert gpu.cache_variables("node2") != found
    folder.chmod(0o777)  # somebody else may have put code there
    assert gpu.cache_variables("node1") == {}
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert gpu.cache_variables("node1") == {}
    tmp_path.chmod(0o777)  # without the sticky bit others may put one in its place
    assert gpu.cache_variables("node3") == {}
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/none"])
    assert gpu.cache_variables("node1") == {}
