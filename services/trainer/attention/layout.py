"""Shared-prompt packing (arXiv 2511.18871, section on shared-prompt attention): integers only, no kernel.

A group is laid out as [P | R1 | ... | RG] in one row; several groups follow one another. A beginning that all prompts
of the row share (a system prompt, a template) may come once before them as the prefix F; P is the rest of the prompt:

    row         f0 f1 | p0 p1 | a0 a1 | b0 b1 b2 | p0 | ...
    position     0  1 |  2  3 |  4  5 |  4  5  6 |  2 | ...     every response continues where its prompt ends
    sees        F causal | F, P causal | F, P, own | F, P, own | the next group sees F, and nothing of this one

The last token of a response predicts nothing, so it is not an input: a response of L tokens occupies L - 1 places. Its
first token is predicted by the last prompt position, which G responses share.

An episode whose history was rewritten forks: its response is a tree of segments. So the row is a forest of segments in
pre-order (prefix, prompts, segments of responses), and a place sees its own segment causally and all of its ancestors:

    row         p0 p1 | a0 a1 | b0 | c0 c1 | d0 d1 |        a forks into b and c; d is the next response
    parent       none |     P |  a |     a |     P |
    position     0  1 |  2  3 |  4 |  4  5 |  2  3 |

Legend: T places of the row, N response tokens (targets), G responses of a group, L tokens of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Tree:
    """The places of one response: segments in pre-order, each behind the last place of its parent (-1: the prompt).

    A response that does not fork is one segment; it has no places if the response is a single token.
    """

    lengths: tuple[int, ...]  # places
    parents: tuple[int, ...]  # indices of segments of this tree
    predictors: (
        torch.Tensor
    )  # [L] int64: the place, from the tree's first, that predicts a token; -1: the prompt's last

    @classmethod
    def chain(cls, num_tokens: int) -> "Tree":
        return cls((num_tokens - 1,), (-1,), torch.arange(-1, num_tokens - 1))

    def paths(self) -> list[list[int]]:
        """Return the segments from the prompt to each leaf."""
        to_segment: list[list[int]] = []
        for index, parent in enumerate(self.parents):
            to_segment.append([*(to_segment[parent] if parent >= 0 else []), index])
        parents = set(self.parents)
        return [path for index, path in enumerate(to_segment) if index not in parents]


@dataclass(frozen=True)
class Segment:
    """Neighbouring places of the row that see each other causally, and all of the parent and of its ancestors."""

    start: int
    length: int
    parent: int  # index into the row's segments; -1: nothing comes before
    position: int  # position of the first place

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class GroupSpan:
    """The location of one group in the row: its prompt (without the row's prefix), then the segments of its responses.

    Segments may be empty.
    """

    prompt: Segment
    segments: tuple[Segment, ...]
    trees: tuple[Tree, ...]  # one for each response; `segments` lists their segments

    @property
    def end(self) -> int:
        return self.segments[-1].end

    @cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        return tuple(segment.length for segment in self.segments)


@dataclass(frozen=True)
class PackedLayout:
    groups: tuple[GroupSpan, ...]
    segments: tuple[Segment, ...]  # segments of the whole row, in pre-order
    position_ids: torch.Tensor  # [T] int64
    logit_index: torch.Tensor  # [N] int64: the place whose logits predict target n
    prefix_length: int = 0

    @property
    def spans(self) -> tuple[GroupSpan, ...]:
        """The groups, preceded by the prefix, if there is one, as a group without responses."""
        if not self.prefix_length:
            return self.groups
        prefix = self.segments[0]
        return (GroupSpan(prefix, (Segment(prefix.end, 0, 0, prefix.end),), (Tree.chain(1),)), *self.groups)

    @property
    def num_places(self) -> int:
        return len(self.position_ids)

    @property
    def has_forks(self) -> bool:
        """True if some response forks behind its first token: then prompts and responses are not all."""
        return any(parent >= 0 for group in self.groups for tree in group.trees for parent in tree.parents)

    def path(self, index: int) -> list[Segment]:
        """Return the ancestors of a segment, from the first place of the row's prefix or prompt on."""
        path: list[Segment] = []
        while (index := self.segments[index].parent) >= 0:
            path.append(self.segments[index])
        return path[::-1]


def build_layout(
    groups: Sequence[tuple[int, Sequence[int | Tree]]], device: torch.device | str = "cpu", prefix_length: int = 0
) -> PackedLayout:
    """Lay out groups given as (prompt length, [tokens of each response, or its tree]). Prompt lengths include the
    prefix.

    Raises ValueError on an empty part; a prompt has at least one place after the prefix.

    >>> build_layout([(3, [2, 1])]).logit_index.tolist()   # p0 p1 p2 a0: a0<-p2, a1<-a0, b0<-p2
    [2, 3, 2]
    """
    spans: list[GroupSpan] = []
    segments: list[Segment] = []
    logit_index: list[torch.Tensor] = []

    def add(length: int, parent: int) -> None:
        start = segments[-1].end if segments else 0
        before = segments[parent] if parent >= 0 else None
        segments.append(Segment(start, length, parent, before.position + before.length if before else 0))

    if prefix_length:
        add(prefix_length, -1)
    for prompt_length, responses in groups:
        own_length = prompt_length - prefix_length
        trees = tuple(Tree.chain(response) if isinstance(response, int) else response for response in responses)
        if own_length < 1 or not trees or not all(len(tree.predictors) for tree in trees):
            raise ValueError(
                f"a group needs a prompt longer than the prefix and non-empty responses, got {prompt_length} tokens, "
                f"{prefix_length} of them prefix, and {list(responses)}"
            )
        prompt = len(segments)
        add(own_length, 0 if prefix_length else -1)
        for tree in trees:
            first = len(segments)
            for length, parent in zip(tree.lengths, tree.parents, strict=True):
                add(length, prompt if parent < 0 else first + parent)
            places = segments[first].start + tree.predictors
            logit_index.append(torch.where(tree.predictors < 0, segments[prompt].end - 1, places))
        spans.append(GroupSpan(segments[prompt], tuple(segments[prompt + 1 :]), trees))
    positions = [torch.arange(segment.position, segment.position + segment.length) for segment in segments]
    position_ids, logit_index_N = torch.cat(positions).to(device), torch.cat(logit_index).to(device)
    return PackedLayout(tuple(spans), tuple(segments), position_ids, logit_index_N, prefix_length)


def dense_mask(layout: PackedLayout) -> torch.Tensor:
    """Return the reference mask [T, T] bool, true where a query (row) may see a key (column). Quadratic; for checks."""
    mask = torch.zeros(layout.num_places, layout.num_places, dtype=torch.bool)
    for index, segment in enumerate(layout.segments):
        places = slice(segment.start, segment.end)
        mask[places, places] = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
        for ancestor in layout.path(index):
            mask[places, ancestor.start : ancestor.end] = True
    return mask
