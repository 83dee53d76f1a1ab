"""A head without state, like Medusa's: it predicts the next tokens from the newest feature."""

import torch
from torch import Tensor, nn

from specbench_cli.api import ArtifactSpec, FeatureHead, Method, MethodParams, best_tree, fill_from


class LinearHead(FeatureHead):
    kind = "linear"

    def __init__(self, target, levels: int = 3) -> None:
        super().__init__(target, levels=levels)
        self.maps = nn.Parameter(torch.randn(levels, self.width, self.width) / self.width**0.5)

    def forward(self, rows: Tensor) -> Tensor:
        return self.target.unembed(rows @ self.maps)  # [levels, n, V]


class LinearParams(MethodParams):
    head: str = "auto"
    nodes: int = 12


class Linear(Method):
    """Linear: level k of the tree is filled from a linear map of the newest feature."""

    Params, needs = LinearParams, frozenset({"head"})

    def artifacts(self):
        return (ArtifactSpec(LinearHead, self.params.head),)

    def start(self, session):
        self.head = session.artifact(*self.artifacts())
        session.capture_layers(self.head.captured_layers)
        self.tree = best_tree(self.params.nodes, depth=self.head.sizes["levels"])
        session.reserve(len(self.tree.nodes))

    def propose(self, session, limit):
        return fill_from(self.tree, self.head(session.features())[:, 0], session)
