"""Shared-prompt packing (arXiv 2511.18871, section on shared-prompt attention): integers only, no kernel.

A group is laid out as [P | R1 | ... | RG] in one row; several groups follow one another. A beginning that all prompts
of the row share (a system prompt, a template) may come once before them as the prefix F; P is the rest of the prompt:

    row         f0 f1 | p0 p1 | a0 a1 | b0 b1 b2 | p0 | ...
    position     0  1 |  2  3 |  4  5 |  4  5  6 |  2 | ...     every response continues where its prompt ends
    sees        F causal | F, P causal | F, P, own | F, P, own | the next group sees F, and nothing of this one

The last token of a response predicts nothing, so it is not an input: a response of L tokens occupies L - 1 places. Its
first token is predicted by the last prompt position, which G responses share.

Legend: T places of the row, N response tokens (targets), G responses of a group.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupSpan:
    """The location of one group in the row. `response_lengths` count inputs (tokens - 1) and may be 0.

    `prompt_length` leaves out the row's prefix.
    """

    start: int
    prompt_length: int
    response_starts: tuple[int, ...]
    response_lengths: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.response_starts[-1] + self.response_lengths[-1]


@dataclass(frozen=True)
class PackedLayout:
    groups: tuple[GroupSpan, ...]
    position_ids: torch.Tensor  # [T] int64
    logit_index: torch.Tensor  # [N] int64: the place whose logits predict target n
    prefix_length: int = 0

    @property
    def spans(self) -> tuple[GroupSpan, ...]:
        """The groups, preceded by the prefix, if there is one, as a group without responses."""
        length = self.prefix_length
        return (GroupSpan(0, length, (length,), (0,)), *self.groups) if length else self.groups

    @property
    def num_places(self) -> int:
        return len(self.position_ids)


def build_layout(
    groups: list[tuple[int, list[int]]], device: torch.device | str = "cpu", prefix_length: int = 0
) -> PackedLayout:
    """Lay out groups given as (prompt length, [tokens of each response]). Prompt lengths include the prefix.

    Raises ValueError on an empty part; a prompt has at least one place after the prefix.

    >>> build_layout([(3, [2, 1])]).logit_index.tolist()   # p0 p1 p2 a0: a0<-p2, a1<-a0, b0<-p2
    [2, 3, 2]
    """
    spans: list[GroupSpan] = []
    positions = [torch.arange(prefix_length)]
    logit_index: list[torch.Tensor] = []
    start = prefix_length
    for prompt_length, num_tokens in groups:
        own_length = prompt_length - prefix_length
        if own_length < 1 or not num_tokens or min(num_tokens) < 1:
            raise ValueError(
                f"a group needs a prompt longer than the prefix and non-empty responses, got {prompt_length} tokens, "
                f"{prefix_length} of them prefix, and {num_tokens}"
            )
        place = start + own_length
        last_prompt_place = torch.tensor([place - 1])
        positions.append(torch.arange(prefix_length, prompt_length))
        starts = []
        for length in num_tokens:
            starts.append(place)
            positions.append(torch.arange(prompt_length, prompt_length + length - 1))
            logit_index += [last_prompt_place, torch.arange(place, place + length - 1)]
            place += length - 1
        spans.append(GroupSpan(start, own_length, tuple(starts), tuple(length - 1 for length in num_tokens)))
        start = place
    position_ids, logit_index_N = torch.cat(positions).to(device), torch.cat(logit_index).to(device)
    return PackedLayout(tuple(spans), position_ids, logit_index_N, prefix_length)


def dense_mask(layout: PackedLayout) -> torch.Tensor:
    """Return the reference mask [T, T] bool, true where a query (row) may see a key (column). Quadratic; for checks."""
    mask = torch.zeros(layout.num_places, layout.num_places, dtype=torch.bool)
    for group in layout.spans:
        prompt = slice(group.start, group.start + group.prompt_length)
        mask[group.start : group.end, : min(layout.prefix_length, group.start)] = True
        mask[prompt, prompt] = torch.ones(group.prompt_length, group.prompt_length, dtype=torch.bool).tril()
        for start, length in zip(group.response_starts, group.response_lengths, strict=True):
            response = slice(start, start + length)
            mask[response, prompt] = True
            mask[response, response] = torch.ones(length, length, dtype=torch.bool).tril()
    return mask
