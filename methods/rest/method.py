"""REST: retrieval-based speculative decoding, which drafts from a datastore of texts.

Zhenyu He, Zexuan Zhong, Tianle Cai, Jason D. Lee, Di He: REST: Retrieval-Based Speculative
Decoding, NAACL 2024, arXiv:2311.08252.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from methods.rest.datastore import Datastore
from specbench_cli.api import ArtifactSpec, Draft, Field, Method, MethodParams, Session

Ints = NDArray[Any]


class RestParams(MethodParams):
    """Parameters of `Rest`."""

    longest: int = Field(
        16,
        ge=1,
        description="maximum length of the suffix to look up, in tokens (authors' code: 16)",
    )
    shortest: int = Field(
        2, ge=1, description="minimum length of that suffix, in tokens (authors' code: 2)"
    )
    matches: int = Field(
        5000,
        ge=1,
        description="maximum number of occurrences whose continuations are read (authors' code:"
        " 5000)",
    )
    depth: int = Field(
        10,
        ge=1,
        description="number of tokens of a continuation, which is the number of levels of the tree",
    )
    nodes: int = Field(64, ge=1, description="number of nodes of the tree (authors' code: 64)")
    datastore: str = Field(
        "auto", description="datastore: auto (the default one of the target), a folder or a hub id"
    )


class Rest(Method):
    """REST: drafts a tree of the most frequent continuations of the current suffix in a datastore.

    Lossless because the tree depends only on the text and on a datastore that does not change. Its
    tokens are not drawn at random. A draft token is accepted with the probability that the target
    gives it.
    Differs from the authors' code, which draws a new target token for every path through a node.
    Its sampled outputs therefore do not follow the target's distribution. Equally frequent prefixes
    are ordered by length, then by token, not by a hash map. If there are more than `matches`
    occurrences, every n-th occurrence is used. The authors' code uses the first occurrences.
    Without a match the step is plain decoding.

    The datastore is read-only. The command `specbench train rest` builds one.

    One step:
    1. Find the longest suffix of the text, of `shortest` to `longest` tokens, that occurs in the
       datastore. A binary search finds its occurrences in the suffix array.
    2. Read the continuation of each occurrence: `depth` tokens, or fewer if the text ends before.
    3. Build a trie of all prefixes of the continuations. Draft the `nodes` most frequent prefixes.
       They form a tree, because a prefix is never more frequent than a shorter one.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "rest"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("he2024rest",)
    Params: ClassVar[type[MethodParams]] = RestParams
    params: RestParams

    def artifacts(self) -> tuple[ArtifactSpec, ...]:
        """Return the datastore as the trained artifact that the method needs."""
        return (ArtifactSpec(Datastore, self.params.datastore),)

    def start(self, session: Session) -> None:
        """Load the datastore and reserve space for the tree."""
        (self.store,) = map(session.artifact, self.artifacts())
        session.reserve(self.params.nodes)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        params, text = self.params, session.tokens()
        n = self._find_longest_suffix(text[-params.longest :])
        depth = min(params.depth, limit)
        if n < params.shortest or not depth:
            return session.chain(())
        matches = self.store.find(text[-n:])
        continuations = self.store.continuations(matches, n, depth, params.matches)
        return session.tree(*select_heaviest(continuations, self.store.end, params.nodes))

    def _find_longest_suffix(self, text: Sequence[int]) -> int:
        """Return the length of the longest suffix that occurs in the datastore (step 1 of the class
        docstring).

        If a suffix occurs, all shorter suffixes occur too. The length is therefore found by binary
        search.
        """
        shortest = self.params.shortest
        lengths = range(shortest, len(text) + 1)
        known = bisect_left(lengths, True, key=lambda n: not self.store.find(text[-n:]))
        return shortest + known - 1


def select_heaviest(continuations: Ints, end: int, nodes: int) -> tuple[list[int], tuple[int, ...]]:
    """Return the draft tree of the most frequent prefixes of the continuations, as (tokens,
    parents).

    A parent is an index into the tokens, or -1 for the root.

    Args:
        continuations: Continuations, [continuations, levels]. Continuations with equal prefixes are
            adjacent.
        end: Padding token after the end of a text.
        nodes: Maximum number of nodes.
    """
    # Adjacent rows with equal prefixes share a node. A new node begins at a row whose prefix
    # differs from the prefix of the previous row.
    begins = np.ones(continuations.shape, dtype=bool)
    begins[1:] = np.logical_or.accumulate(continuations[1:] != continuations[:-1], axis=1)
    node = begins.T.ravel().cumsum() - 1  # node of each row on each level
    first = begins.T.ravel().nonzero()[0]
    tokens, counts = continuations.T.ravel()[first], np.bincount(node)
    above = np.where(first < len(continuations), -1, node[first - len(continuations)])
    order = np.argsort(np.where(tokens == end, 1, -counts), kind="stable")[:nodes]
    chosen = order[tokens[order] != end].tolist()
    place = {number: at for at, number in enumerate(chosen)}
    return tokens[chosen].tolist(), tuple(place.get(number, -1) for number in above[chosen])
