"""The queries with which a decoder starts."""

from typing import NamedTuple

import torch
from torch import Tensor


class DenoisingQueries(NamedTuple):
    """Queries made of ground truth with noise. P of them are there, and some of them may be no more than room.

    Attributes:
        query: [B, P, C]. references: [B, P, 4] boxes (cx, cy, w, h) in 0..1 of the image.
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
        query: [B, Q, C].
        query_pos: [B, Q, C], or None if the decoder computes it from the references.
        references: [B, Q, 2] points, or in two stages [B, Q, 4] boxes (cx, cy, w, h), in 0..1 of the image.
        encoder_logits: [B, K, classes] of those K proposals that get a loss of the first stage. It is None outside
            training and without two stages.
        encoder_boxes: [B, K, 4] (cx, cy, w, h), likewise.
        denoising: queries that are decoded before these, or None.
    """

    query: Tensor
    query_pos: Tensor | None
    references: Tensor
    encoder_logits: Tensor | None = None
    encoder_boxes: Tensor | None = None
    denoising: DenoisingQueries | None = None
