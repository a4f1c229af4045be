"""What a decoder starts from, and the encoder's proposals."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.positional_encoding import box_embedding  # noqa: F401  (a name of this module, too)
from .flat_pyramid import FlatPyramid


class DenoisingQueries(NamedTuple):
    """Queries made of ground truth with noise. P of them are there, and some of them may be no more than room.

    Attributes:
        query: [B, P, C]. references: [B, P, box_dim] boxes of the network; see ``UprightBoxCoder``.
        targets: [B, P] int64, the target that each query shall find, or N if it shall find none.
        is_counted: [P] bool, False for queries that are room, which get no loss.
        groups: [P] int64. Queries see those of their own group and no other one.
    """

    query: Tensor
    references: Tensor
    targets: Tensor
    is_counted: Tensor
    groups: Tensor

    def mask(self, num_queries: int) -> Tensor:
        """Return the mask [P + Q, P + Q] of self-attention among these and Q further queries, which do not see these.

        It is True where a query must not attend to another.
        """
        groups = torch.cat((self.groups, self.groups.new_full((num_queries,), -1)))
        return (groups.unsqueeze(1) != groups) & (groups >= 0)


class DecoderStart(NamedTuple):
    """The inputs of the decoder.

    Attributes:
        query: [B, Q, C]. The denoising queries come first.
        query_pos: [B, Q, C], or None if the decoder computes it from the references.
        references: [B, Q, 2] points in 0..1 of the image, or in two stages [B, Q, box_dim] boxes of the network.
        encoder_logits: [B, K, classes] of those K proposals that get a loss of the first stage. It is None outside
            training and without two stages.
        encoder_boxes: [B, K, box_dim], likewise.
        denoising: the denoising queries among these, or None.
        self_attn_mask: [Q, Q] bool, True where a query must not attend to another, or None.
    """

    query: Tensor
    query_pos: Tensor | None
    references: Tensor
    encoder_logits: Tensor | None = None
    encoder_boxes: Tensor | None = None
    denoising: DenoisingQueries | None = None
    self_attn_mask: Tensor | None = None


def pixel_proposals(pyramid: FlatPyramid) -> tuple[Tensor, Tensor]:
    """Return one box per pixel of the pyramid, and whether it is usable.

    The box of a pixel in level l is centred on the pixel, and its sides are 0.05·2^l times the image's. A box is
    usable if the pixel is not padding and all four numbers lie between 0.01 and 0.99.

    Returns:
        the logits [B or 1, S, 4] of (cx, cy, w, h), which are +inf for boxes that are not usable, and a bool mask
        [B or 1, S, 1], True for usable boxes.
    """
    side = (0.05 * 2.0**pyramid.pixel_levels).view(1, -1, 1).expand_as(pyramid.centers)
    boxes = torch.cat((pyramid.centers, side), dim=-1)
    usable = ((boxes > 0.01) & (boxes < 0.99)).all(dim=-1, keepdim=True)
    if pyramid.padding_mask is not None:
        usable = usable & ~pyramid.padding_mask.unsqueeze(-1)
    return torch.logit(boxes).masked_fill(~usable, math.inf), usable
