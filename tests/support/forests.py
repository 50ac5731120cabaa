"""Sequences that share beginnings, and attention over them by its definition."""

import torch

FORESTS = {
    "one sequence": [[0, 7, 7]],
    "a pair": [[0, 4, 9], [4, 6, 6], [6, 9, 9]],
    "the end of one": [[0, 3, 5], [3, 5, 5]],
    "two trees": [
        [0, 3, 10],
        [3, 5, 8],
        [5, 6, 6],
        [6, 8, 8],
        [8, 10, 10],
        [10, 14, 14],
        [14, 16, 19],
        [16, 19, 19],
    ],
    "single tokens": [[0, 1, 4], [1, 2, 3], [2, 3, 3], [3, 4, 4]],
    "longer than a block of the kernel": [[0, 530, 600], [530, 565, 565], [565, 600, 600], [600, 640, 640]],
}
"""Segments of each case: start, end, and end of all descendants."""


class Layer(torch.nn.Module):
    """Attributes of a layer that the attention functions of transformers read."""

    is_causal = True

    def __init__(self, groups=1):
        super().__init__()
        self.num_key_value_groups = groups


def sight(segments):
    """Return the attention mask [tokens, tokens]. A token sees itself, earlier tokens of its segment, and ancestors."""
    owner = [index for index, (start, end, _) in enumerate(segments) for _ in range(start, end)]
    mask = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for query, mine in enumerate(owner):
        for key, other in enumerate(owner):
            ancestor = other < mine and segments[mine][0] < segments[other][2]
            mask[query, key] = ancestor or (other == mine and key <= query)
    return mask


def dense(query, key, value, segments, scaling=None):
    """Return attention by its definition: all scores, a mask, a softmax [1, tokens, heads, features]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~sight(segments), float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


def tensors(tokens, groups=1, features=8, dtype=torch.float64):
    """Return query, key and value of two key heads, laid out like a model's projections."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, tokens, heads, features, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (2 * groups, 2, 2)
    ]
