"""A small MultiScaleDeformableAttention and its inputs, for tests."""

import torch

from visdet.models.layers import MultiScaleDeformableAttention

SHAPES = torch.tensor([[5, 7], [3, 4]])
S = 5 * 7 + 3 * 4


def module(**options):
    torch.manual_seed(0)
    attention = MultiScaleDeformableAttention(
        **{"embed_dims": 12, "num_heads": 3, "num_levels": 2, "num_points": 2, "batch_first": True, **options}
    ).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def inputs(reference_size=2):
    torch.manual_seed(1)
    return {
        "query": torch.randn(2, 6, 12),
        "value": torch.randn(2, S, 12),
        "query_pos": torch.randn(2, 6, 12),
        "reference_points": torch.rand(2, 6, 2, reference_size),
        "spatial_shapes": SHAPES,
    }
