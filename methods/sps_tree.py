"""Speculative sampling with a token tree of the draft model.

Xupeng Miao et al.: SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
Inference and Verification, ASPLOS 2024, arXiv:2305.09781. Children without replacement: Wonseok
Jeon et al.: Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without
Replacement, 2024, arXiv:2402.14160. Dynamic trees: EAGLE-2, EMNLP 2024, arXiv:2406.16858.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from specbench_cli.api import (
    AUTO,
    Draft,
    Field,
    GrownTree,
    Levels,
    Method,
    MethodParams,
    Nodes,
    Outcome,
    Session,
    Widths,
    create_size_rule,
    fill,
    grow,
    max_nodes,
    tree_of_widths,
)


class SpsTreeParams(MethodParams):
    """Parameters of `SpsTree`."""

    width: int = Field(
        2, ge=1, description="number of children of the root; in a dynamic tree, of every node"
    )
    depth: int = Field(
        8, ge=1, description="number of levels of the tree; each takes one draft forward"
    )
    widths: Widths | None = Field(
        None,
        description="number of children of each node, level by level, such as 3,2,1,1"
        " (SpecInfer's expansion vector); by default `width`, then 1 on each further"
        " level up to `depth`",
    )
    draw_mode: Literal["without_replacement", "independent", "deterministic"] = Field(
        "without_replacement",
        description="how children are chosen with --verify rejection: drawn without"
        " replacement, drawn independently, or the most likely tokens"
        " (deterministic); a dynamic tree always takes the most likely tokens",
    )
    shape: Literal["static", "dynamic"] = Field(
        "static",
        description="static: the shape follows from `widths`; dynamic: the `nodes` nodes that"
        " the draft model finds most likely",
    )
    nodes: Nodes = Field(
        16,
        description="number of nodes of a dynamic tree, or auto: chosen from the measured costs"
        " of forwards",
    )


class SpsTree(Method):
    """Tree speculative sampling: a draft model drafts a token tree for one target forward.

    Lossless because children are tested in the order of their draws (SpecInfer's multi-step
    speculative sampling). The first child is tested against the target's distribution. Each
    rejection replaces this distribution by its residual. If all children are rejected, the next
    token is drawn from the last residual. With parameters that take the most likely tokens as
    children instead of drawing them, a child is accepted with the probability that the target gives
    its token. In greedy decoding and coupled sampling (all methods share the Gumbel noise) a child
    is accepted if and only if the target chooses it.
    Differs from SpecInfer: there is one draft model, and siblings are drawn from its distribution.

    One step:
    1. The draft model processes its pending tokens. Choose the root's children.
    2. For each further level, the draft model processes the nodes of the previous level in one
       forward. Each node attends only to its own ancestors. Choose the children of these nodes. In
       a dynamic tree, the draft model processes only the `width` nodes with the most likely paths
       on each level. At the end, keep the best `nodes` nodes of all levels.
    3. (engine) One target forward over the last committed token and all nodes; verify; commit.
    4. Keep the draft model's KV entries of accepted nodes.
    """

    name: ClassVar[str] = "sps-tree"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("miao2024specinfer", "jeon2024rsd")
    builds_on: ClassVar[tuple[str, ...]] = ("li2024eagle2",)
    Params: ClassVar[type[MethodParams]] = SpsTreeParams
    params: SpsTreeParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    @property
    def uses_costs(self) -> bool:
        """True if the method chooses the tree size from measured forward times."""
        return self.params.shape == "dynamic" and self.params.nodes == AUTO

    def start(self, session: Session) -> None:
        """Reserve space for the largest draft tree, and prefill the draft model."""
        params = self.params
        widths = params.widths or (params.width, *[1] * (params.depth - 1))
        self.shape = tree_of_widths(widths).truncate(len(widths), session.target.vocab_size)
        if params.shape == "dynamic":
            largest, fed = max_nodes(params.nodes), params.width * (params.depth - 1)
        else:
            largest, fed = len(self.shape.nodes), 1 + max(self.shape.fed)
        self.levels = Levels.of_draft(session, nodes=largest, fed=fed)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        params, levels = self.params, self.levels
        if limit < 1:
            self.grown = GrownTree(session.chain(()), ())
            return self.grown.draft
        # Step 1: Choose the root's children from the logits at the last committed token.
        root = levels.begin(session.pending_tokens(levels.state.length()))
        # Step 2, dynamic tree: Expand the nodes with the most likely paths.
        if params.shape == "dynamic":
            nodes, k, depth = params.nodes, params.width, min(params.depth, limit)
            size = create_size_rule(session, levels.model, nodes, width=k, depth=depth)
            self.grown = grow(
                levels, root, session, k=k, depth=depth, nodes=max_nodes(nodes), size=size
            )
        else:
            # Step 2, other trees: `widths` gives the number of children for each level.
            shape = self.shape.truncate(limit, session.target.vocab_size)
            self.grown = fill(shape, levels, root, session, how=params.draw_mode)
        return self.grown.draft

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 4 of the class docstring."""
        self.levels.keep(self.grown.rows(outcome.path))
