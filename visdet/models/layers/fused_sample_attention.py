"""A module for attention over samples of an image, such as those along an epipolar line."""

from typing import Any

import torch
from mmengine.model import BaseModule, constant_init, xavier_init
from torch import Tensor, nn

from visdet import ops
from visdet.checks.arguments import Count, Positive
from visdet.registry import MODELS

from .precision import at_least_float32


@MODELS.register_module()
class FusedSampleAttention(BaseModule):
    """Attention of each query, in every head, to D given positions of an image. The sampled values are never stored.

    score[b, g, q, d] = (<query_proj(query)[b, g, q], f> + <depth_key(f), encoding(depth[b, q, d])>) / sqrt(C),
    where f is the image at samples[b, q, d], bilinear, zero outside, and encoding holds sin and cos of
    2 pi 2^k depth for k < num_octaves; weights = softmax of the scores over d;
    output = identity + dropout(output_proj(sum_d weights f, the heads side by side)).

    There is no projection of keys and values. Because <q, K f> = <K^T q, f> and sum_d w V f = V sum_d w f, the
    projections of the queries and of the sums contain them, and the image is sampled without a projection.
    Scores and weights are float32 (float64 for float64 images) whatever the dtype of the image.

    Args:
        embed_dims: channels E of the queries and of the output.
        num_heads: number G of heads.
        image_dims: channels C of the images. The default is ``embed_dims``.
        num_octaves: octaves of the depth encoding. With 0, the scores do not depend on the depth.
        dropout: dropout of the output before ``identity`` is added.
        fused: whether the fused operators are used. Otherwise, the definition is computed in plain torch, which stores
            the [B, C, Q, D] tensor of all sampled values; this is meant for comparisons.

    Raises:
        ValueError: a number of channels, heads or octaves is too small.

    Source: the idea is that of He et al., Epipolar Transformers, CVPR 2020, and Charatan et al., pixelSplat, CVPR 2024.
    ``visdet.ops.sample_dot`` and ``visdet.ops.sample_sum`` do the computation.
    """

    def __init__(
        self,
        embed_dims: Positive = 128,
        num_heads: Positive = 4,
        image_dims: Positive | None = None,
        num_octaves: Count = 6,
        dropout: float = 0.0,
        fused: bool = True,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        image_dims = image_dims or embed_dims
        self.num_heads = num_heads
        self.image_dims = image_dims
        self.num_octaves = num_octaves
        self.fused = fused
        self.query_proj = nn.Linear(embed_dims, num_heads * image_dims)
        self.depth_key = nn.Conv2d(image_dims, 2 * num_octaves, 1) if num_octaves else None
        self.output_proj = nn.Linear(num_heads * image_dims, embed_dims)
        self.dropout = nn.Dropout(dropout)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise the projections by Xavier's uniform distribution, and the depth key by zeros.

        At first, the scores therefore do not depend on the depth.
        """
        xavier_init(self.query_proj, distribution="uniform")
        xavier_init(self.output_proj, distribution="uniform")
        if self.depth_key is not None:
            constant_init(self.depth_key, 0.0)
        self.is_init = True

    def forward(
        self,
        query: Tensor,  # Float[B, Q, E]
        images: Tensor,  # Float[B, C, H, W]
        samples: Tensor,  # Float[B, Q, D, 2]
        depths: Tensor | None = None,  # Float[B, Q, D]
        sample_mask: Tensor | None = None,  # Bool[B, Q, D]
        identity: Tensor | None = None,  # Float[B, Q, E]
    ) -> tuple[Tensor, Tensor]:  # Float[B, Q, E], Float[B, G, Q, D]
        """Return the attended queries plus ``identity``, and the weights of the samples.

        Args:
            query: [B, Q, E].
            images: [B, C, H, W], NCHW or channels_last.
            samples: [B, Q, D, 2], (x, y) in -1..1 from edge to edge of the image. Outside, the image is zero.
            depths: [B, Q, D], the depth of each sample. It should be scaled so that the whole range of depths is
                shorter than 1, which is one period of the first octave. It is optional if ``num_octaves`` is 0.
            sample_mask: [B, Q, D] bool, True where a sample must get no weight. A query without any sample left has
                weights of zero and takes nothing from the image.
            identity: [B, Q, E], by default ``query``.

        Returns:
            the queries [B, Q, E], and the weights [B, G, Q, D].

        Raises:
            ValueError: the depths are missing.
        """
        num_octaves = self.num_octaves
        if depths is None:
            if num_octaves:
                raise ValueError(f"FusedSampleAttention: depths must be given, num_octaves is {num_octaves}")
            depths = samples.new_zeros(samples.shape[:-1])
        identity = query if identity is None else identity
        dot = ops.sample_dot if self.fused else ops.sample_dot_reference
        weighted_sum = ops.sample_sum if self.fused else ops.sample_sum_reference

        queries = self.query_proj(query).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, G, Q, C]
        keys = images
        if self.depth_key is not None:
            keys = torch.cat((images, self.depth_key(images).to(images.dtype)), dim=1)
        scores = dot(keys, samples, queries.to(keys.dtype), depths, num_octaves)  # [B, G, Q, D]
        scores = at_least_float32(scores) * self.image_dims**-0.5
        if sample_mask is None:
            weights = scores.softmax(dim=-1)
        else:
            mask = sample_mask.unsqueeze(1)
            lowest = torch.finfo(scores.dtype).min  # The softmax of a row that is all -inf would be NaN.
            weights = scores.masked_fill(mask, lowest).softmax(dim=-1).masked_fill(mask, 0.0)
        found = weighted_sum(images, samples, weights)  # [B, G, Q, C]
        out = self.output_proj(found.transpose(1, 2).flatten(2).to(query.dtype))
        return self.dropout(out) + identity, weights
