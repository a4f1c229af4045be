"""The detector Deformable DETR."""

from typing import Any

from mmengine.model import xavier_init
from torch import Tensor, nn

from visdet.registry import MODELS

from ..layers.normalization import LayerNorm
from ..layers.plain import all_rows
from ..layers.precision import in_full_precision, in_type_of
from ..rows import rows_at
from .base import DeformableDetectionTransformer, TrainingBatch
from .decoder_start import DecoderStart, box_embedding, pixel_proposals
from .flat_pyramid import FlatPyramid


@MODELS.register_module()
class DeformableDETR(DeformableDetectionTransformer):
    """Deformable DETR, which can use iterative box refinement and two stages.

    The decoder starts with learned queries or, in two stages, with queries made of the encoder's best proposals.

    Args:
        **detector: see ``DeformableDetectionTransformer``.

    Source: Zhu et al., Deformable DETR, ICLR 2021; keywords and parameter names are mmdet's. Two things differ: two
    stages work with any ``embed_dims`` that is a multiple of 4, and predictions for a sample without ``scale_factor``
    stay in pixels of the network's input.
    """

    def __init__(self, **detector: Any) -> None:
        super().__init__(**detector)
        embed_dims = self.embed_dims
        self.assigns_all_pixels = self.as_two_stage
        both = embed_dims * 2  # query_pos, then query
        if self.as_two_stage:
            self.pos_trans_fc = nn.Linear(self.box_coder.num_positions * (embed_dims // 2), both)
            self.pos_trans_norm = LayerNorm(both)
        else:
            self.query_embedding = nn.Embedding(self.num_queries, both)
            self.reference_points_fc = nn.Linear(embed_dims, 2)

    def init_weights(self) -> None:
        super().init_weights()
        if self.as_two_stage:
            nn.init.xavier_uniform_(self.pos_trans_fc.weight)
        else:
            nn.init.normal_(self.query_embedding.weight)
            xavier_init(self.reference_points_fc, distribution="uniform")

    def decoder_start(
        self, memory: Tensor, pyramid: FlatPyramid, batch: TrainingBatch | None = None
    ) -> DecoderStart:
        return self.proposals(memory, pyramid) if self.as_two_stage else self.learned_queries(memory.shape[0])

    def learned_queries(self, batch_size: int) -> DecoderStart:
        """Return the learned queries for each image, with the reference points that are predicted from them."""
        rows = all_rows(self.query_embedding).expand(batch_size, -1, -1)
        query_pos, query = rows.chunk(2, dim=-1)
        return DecoderStart(
            query, query_pos, in_full_precision(self.reference_points_fc, query_pos).sigmoid()
        )

    def proposals(self, memory: Tensor, pyramid: FlatPyramid) -> DecoderStart:
        """Return the encoder's best proposals as inputs of the decoder. The logit of class 0 ranks them.

        Args:
            memory: [B, S, C], the output of the encoder.
            pyramid: the pyramid that the encoder has read.
        """
        classify, regress = self.bbox_head.branches(-1)
        box_coder = self.box_coder
        origin, usable = pixel_proposals(pyramid)
        features = self.proposal_features(memory, usable)
        logits = in_full_precision(classify, features)
        box_logits = in_full_precision(regress, features) + box_coder.filled(origin)
        best = self.best_pixels(logits[..., 0], usable, pyramid)
        best_boxes = box_coder.decoded(rows_at(best, box_logits).detach())
        positions = box_coder.positions(best_boxes)
        embedding = in_type_of(self.pos_trans_fc, box_embedding(positions, self.embed_dims // 2))
        query_pos, query = self.pos_trans_norm(self.pos_trans_fc(embedding)).chunk(2, dim=-1)
        if not self.training:
            return DecoderStart(query, query_pos, best_boxes)
        return DecoderStart(query, query_pos, best_boxes, logits, box_coder.decoded(box_logits))
