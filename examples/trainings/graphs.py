"""Graphs: ragged samples, one batch of all nodes, a loss of each graph.

mpirun -np 4 --oversubscribe python examples/trainings/graphs.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import mpitrain


@dataclass
class Graph:
    """One graph, or several side by side, as `torch_geometric.data.Batch`."""

    nodes: Tensor  # `(nodes, 4)`
    edges: Tensor  # int64 `(2, edges)`: from which node to which
    target: Tensor  # `(graphs,)`
    graph_of_node: Tensor  # int64 `(nodes,)`


class Molecules(Dataset[Graph]):
    """Random graphs; made here."""

    def __init__(self, num: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.graphs = []
        for _ in range(num):
            size = int(torch.randint(3, 12, (), generator=random))
            nodes = torch.randn(size, 4, generator=random)
            edges = torch.randint(size, (2, 2 * size), generator=random)
            target = (nodes[edges[0], 0] * nodes[edges[1], 1]).sum() / size
            zeros = torch.zeros(size, dtype=torch.int64)
            self.graphs.append(Graph(nodes, edges, target[None], zeros))

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Graph:
        return self.graphs[index]


class GraphNetwork(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, graph: Graph) -> Tensor:
        found, (sources, targets) = self.embedding(graph.nodes).tanh(), graph.edges
        for layer in self.messages:
            sent = layer(torch.cat([found[sources], found[targets]], 1)).relu()
            found = found + torch.zeros_like(found).index_add(0, targets, sent)
        pooled = found.new_zeros(len(graph.target), found.shape[1])
        return self.head(pooled.index_add(0, graph.graph_of_node, found)).squeeze(1)


def collate(graphs: list[Graph]) -> Graph:
    """Put graphs side by side; `torch_geometric.data.Batch.from_data_list` does it."""
    sizes = torch.tensor([len(graph.nodes) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    return Graph(
        torch.cat([graph.nodes for graph in graphs]),
        torch.cat([it.edges + at for it, at in zip(graphs, starts, strict=True)], 1),
        torch.cat([graph.target for graph in graphs]),
        torch.arange(len(graphs)).repeat_interleave(sizes),
    )


DEFAULTS = mpitrain.TrainConfig(
    epochs=3, global_batch_size=8, optimizer="adam", lr=3e-3
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        GraphNetwork(),
        Molecules(200, seed=1),
        Molecules(61, seed=2),
        config,
        world=world,
        collate_fn=collate,
        loss=lambda found, graph: (found - graph.target).square(),
        metrics={"mae": lambda found, graph: (found - graph.target).abs()},
    )


if __name__ == "__main__":
    build().fit()
