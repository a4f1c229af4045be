"""The detector DINO and its head."""

from typing import Any

from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from ..deformable_detr.base import DeformableDetectionTransformer, TrainingBatch
from ..deformable_detr.decoder_start import DecoderStart
from ..deformable_detr.flat_pyramid import FlatPyramid
from ..deformable_detr.head import DeformableDETRHead
from ..deformable_detr.proposals import pixel_proposals, rows_at
from ..layers.precision import in_full_precision, without_gradients
from ..matching.padded_targets import PaddedTargets


@MODELS.register_module()
class DINOHead(DeformableDETRHead):
    """Deformable DETR's head, for which the encoder's proposals have classes."""

    def targets_of(self, name: str, targets: PaddedTargets) -> PaddedTargets:
        return targets


@MODELS.register_module()
class DINO(DeformableDetectionTransformer):
    """DINO: learned queries at the encoder's best proposals, and denoising queries beside them in training.

    Args:
        dn_cfg: ``label_noise_scale``, ``box_noise_scale`` and ``group_cfg`` of a ``CdnQueryGenerator``.
        **detector: see ``DeformableDetectionTransformer``. ``with_box_refine`` and ``as_two_stage`` must be True.

    Source: Zhang et al., DINO, ICLR 2023; keywords and parameter names are mmdet's.
    """

    decoder_type = "DinoTransformerDecoder"

    def __init__(self, dn_cfg: dict[str, Any] | None = None, **detector: Any) -> None:
        super().__init__(**detector)
        if not (self.with_box_refine and self.as_two_stage):
            raise InvalidInputError(
                "DINO: with_box_refine and as_two_stage must be True, got "
                f"{self.with_box_refine} and {self.as_two_stage}"
            )
        self.query_embedding = nn.Embedding(self.num_queries, self.embed_dims)
        sizes = {"num_classes": self.bbox_head.num_classes, "embed_dims": self.embed_dims}
        self.dn_query_generator = MODELS.build(
            dict(**sizes, **{"type": "CdnQueryGenerator", **(dn_cfg or {})})
        )

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.xavier_uniform_(self.query_embedding.weight)

    def decoder_start(
        self, memory: Tensor, pyramid: FlatPyramid, batch: TrainingBatch | None = None
    ) -> DecoderStart:
        """Return learned queries at the proposals with the highest logit of a class, and denoising queries."""
        classify, regress = self.bbox_head.cls_branches[-1], self.bbox_head.reg_branches[-1]
        origin, usable = pixel_proposals(pyramid)
        with without_gradients(memory.device):
            scores = in_full_precision(classify, self.proposal_features(memory, usable)).amax(-1)
        best = scores.topk(min(self.num_queries, scores.shape[1]), dim=1).indices
        # Only the best proposals get losses, so that only they are computed with gradients, and have boxes.
        features = self.proposal_features(rows_at(best, memory), rows_at(best, usable))
        boxes = (in_full_precision(regress, features) + rows_at(best, origin)).sigmoid()
        query = self.query_embedding.weight[: best.shape[1]].expand(memory.shape[0], -1, -1)
        start = DecoderStart(query, None, boxes.detach())
        if not self.training or batch is None:
            return start
        return start._replace(
            encoder_logits=in_full_precision(classify, features),
            encoder_boxes=boxes,
            denoising=self.dn_query_generator(batch.targets, batch.counts),
        )

    def assign(self, costs: dict[str, Tensor], batch: TrainingBatch) -> dict[str, Tensor]:
        counts = batch.targets.counts
        made = sum(counts) * self.dn_query_generator.num_groups(max(counts))
        return {
            **super().assign(costs, batch),
            "dn_num_boxes": self.bbox_head.divisors(made, batch.images.device),
        }
