"""DINO: Deformable DETR with contrastive denoising queries, and a decoder that embeds the boxes of its queries."""

import functools
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.checks.arguments import AtLeast0
from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from .box_coders import UprightBoxCoder
from .boxes import inverse_sigmoid
from .deformable_detr.base import DeformableDetectionTransformer, TrainingBatch
from .deformable_detr.decoder_start import DecoderStart, DenoisingQueries, box_embedding, pixel_proposals
from .deformable_detr.flat_pyramid import FlatPyramid
from .deformable_detr.head import DeformableDETRHead
from .deformable_detr.transformer import DeformableDetrTransformerDecoder
from .layers.normalization import LayerNorm
from .layers.plain import all_rows
from .layers.precision import in_full_precision, in_type_of, without_gradients
from .matching.padded_targets import PaddedTargets
from .rows import rows_at

_LOGIT = functools.partial(inverse_sigmoid, eps=1e-3)


@MODELS.register_module()
class CdnQueryGenerator(BaseModule):
    """Makes denoising queries of the ground truth of a batch.

    If M is the greatest number of boxes of an image, a group is M positive queries, which shall find the box that they
    were made of, and M negative ones, which shall find nothing. Images with fewer boxes get queries of zeros in the
    middle of the image, which shall find nothing either. Groups do not see each other. So that a step can be captured
    as a CUDA graph, there is the same room whatever M is. Queries that are only room are not seen and get no loss.

    Args:
        num_classes: number of classes. embed_dims: channels of the queries.
        label_noise_scale: twice the share of labels that are replaced by a class at random.
        box_noise_scale: how far a side of a positive box is moved at most, in halves of the box's width or height.
            A side of a negative box is moved by one to two times as much.
        group_cfg: ``dict(dynamic=True, num_dn_queries=100)``, by which there are num_dn_queries // M groups, but at
            least one, or ``dict(dynamic=False, num_groups=...)``.
        box_coder: what a box is, by default an ``UprightBoxCoder``.

    Source: Zhang et al., DINO, ICLR 2023; names and defaults are mmdet's.
    """

    def __init__(
        self,
        num_classes: int,
        embed_dims: int,
        label_noise_scale: AtLeast0 = 0.5,
        box_noise_scale: AtLeast0 = 1.0,
        group_cfg: dict[str, Any] | None = None,
        box_coder: UprightBoxCoder | None = None,
    ) -> None:
        super().__init__()
        self.box_coder = box_coder or UprightBoxCoder()
        group_cfg = {"dynamic": True, "num_dn_queries": 100, "num_groups": None, **(group_cfg or {})}
        self.is_dynamic = group_cfg["dynamic"]
        self.limit = group_cfg["num_dn_queries" if self.is_dynamic else "num_groups"]
        if len(group_cfg) > 3 or not isinstance(self.limit, int) or self.limit < 1:
            raise InvalidInputError(
                "CdnQueryGenerator: group_cfg must have dynamic=True and num_dn_queries >= 1, or dynamic=False and "
                f"num_groups >= 1, got {group_cfg}"
            )
        self.num_classes = num_classes
        self.label_noise_scale = label_noise_scale
        self.box_noise_scale = box_noise_scale
        self.label_embedding = nn.Embedding(num_classes, embed_dims)
        self.class_rows = {"classes": ["label_embedding"]}

    def num_groups(self, most_boxes: Tensor) -> Tensor | int:
        """Return the number of groups for a batch whose images have at most ``most_boxes`` boxes."""
        return (self.limit // most_boxes.clamp(min=1)).clamp(min=1) if self.is_dynamic else self.limit

    def room(self, most_boxes: int) -> int:
        """Return a number of queries that suffices for all batches whose images have at most ``most_boxes`` boxes."""
        return 2 * (max(self.limit, most_boxes) if self.is_dynamic else self.limit * most_boxes)

    def draw(self, batch_size: int, room: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random chances [B, P] in 0..1, labels [B, P], signs and sizes [B, P, box_dim] in 0..1.

        A label replaces the true one if the chance is small. Signs and sizes shift the sides and angles of the boxes.
        """
        shape = (batch_size, room)
        sides = (*shape, self.box_coder.box_dim)
        signs = torch.randint(2, sides, device=device) * 2.0 - 1.0
        labels = torch.randint(self.num_classes, shape, device=device)
        return torch.rand(shape, device=device), labels, signs, torch.rand(sides, device=device)

    def forward(self, targets: PaddedTargets) -> DenoisingQueries:
        """Return the queries for the ground truth of B images. All work runs on the device."""
        box_coder = self.box_coder
        B, N = targets.labels.shape
        room = self.room(N)
        counts = targets.lengths
        chance, other, sign, size = self.draw(B, room, counts.device)
        most = counts.max()
        in_group = most.clamp(min=1)
        per_group = 2 * in_group
        slot = torch.arange(room, device=counts.device)
        is_counted = slot < 2 * most * self.num_groups(most)
        place = slot % per_group
        is_negative = place >= most
        target = (place % in_group).expand(B, room)
        is_made = is_counted & (target < counts.unsqueeze(1))

        labels = targets.labels.gather(1, target)
        labels = torch.where(chance < self.label_noise_scale * 0.5, other, labels)
        boxes_px = rows_at(target, targets.boxes_px)
        shift = (size + is_negative.unsqueeze(-1)) * sign * (self.box_noise_scale / 2)
        noisy = box_coder.jittered(boxes_px, shift, targets.image_whwh)
        encoded = box_coder.encoded(noisy, _LOGIT)
        rows = is_made.unsqueeze(-1)
        return DenoisingQueries(
            query=self.label_embedding(labels) * rows,
            references=box_coder.decoded(torch.where(rows, encoded, 0.0)),
            targets=torch.where(is_made & ~is_negative, target, N),
            is_counted=is_counted,
            groups=torch.where(is_counted, slot // per_group, room + slot),
        )


class BoxPositions(nn.Module):
    """Two linear layers that make the position of a query from the sine embedding of its box.

    Args:
        embed_dims: channels C. num_positions: the numbers that stand for a box; see ``UprightBoxCoder.positions``.
    """

    def __init__(self, embed_dims: int, num_positions: int) -> None:
        super().__init__()
        self.num_feats = embed_dims // 2
        self.layers = nn.ModuleList(
            [nn.Linear(num_positions * self.num_feats, embed_dims), nn.Linear(embed_dims, embed_dims)]
        )

    def forward(self, positions: Tensor) -> Tensor:
        """Return [B, Q, C] from (cx, cy, w, h, ...) [B, Q, num_positions]. The channels of cy precede those of cx."""
        cx, cy, *others = positions.unbind(-1)
        embedding = box_embedding(torch.stack((cy, cx, *others), dim=-1), self.num_feats)
        first, second = self.layers
        return second(first(in_type_of(first, embedding)).relu())


@MODELS.register_module()
class DinoTransformerDecoder(DeformableDetrTransformerDecoder):
    """Deformable DETR's decoder, in which positions follow from the boxes, and gradients look forward twice.

    The position of a query is made of its box before each layer. The box after a layer gets the gradients of the
    predictions of two layers: it is detached as the reference of the next layer, but not in the prediction of that
    layer. The head reads normalised hidden states.

    Args:
        **decoder: see ``DeformableDetrTransformerDecoder``.

    Source: Zhang et al., DINO, ICLR 2023; names are mmdet's.
    """

    def __init__(self, **decoder: Any) -> None:
        super().__init__(**decoder)
        self.ref_point_head = BoxPositions(self.embed_dims, self.box_coder.num_positions)
        self.norm = LayerNorm(self.embed_dims)

    def positions(self, references: Tensor) -> Tensor:
        return self.ref_point_head(self.box_coder.positions(references))

    def refined(self, references: Tensor, branch: nn.Module, query: Tensor) -> Tensor:
        return self.box_coder.refined(in_full_precision(branch, query), references, _LOGIT)

    def outputs(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)


@MODELS.register_module()
class DINOHead(DeformableDETRHead):
    """Deformable DETR's head, for which the encoder's proposals have classes."""

    proposals_have_classes = True

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
        generator = {"type": "CdnQueryGenerator", **(dn_cfg or {})}
        self.dn_query_generator = MODELS.build(
            dict(
                num_classes=self.bbox_head.num_classes,
                embed_dims=self.embed_dims,
                box_coder=self.box_coder,
                **generator,
            )
        )

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.xavier_uniform_(self.query_embedding.weight)

    def decoder_start(
        self, memory: Tensor, pyramid: FlatPyramid, batch: TrainingBatch | None = None
    ) -> DecoderStart:
        """Return learned queries at the proposals with the highest logit of a class, and denoising queries."""
        classify, regress = self.bbox_head.branches(-1)
        origin, usable = pixel_proposals(pyramid)
        with without_gradients(memory.device):
            scores = in_full_precision(classify, self.proposal_features(memory, usable)).amax(-1)
        best = self.best_pixels(scores, usable, pyramid)
        # Only the best proposals get losses, so that only they are computed with gradients, and have boxes.
        features = self.proposal_features(rows_at(best, memory), rows_at(best, usable))
        origin = self.box_coder.filled(rows_at(best, origin))
        boxes = self.box_coder.decoded(in_full_precision(regress, features) + origin)
        query = all_rows(self.query_embedding)[: best.shape[1]].expand(memory.shape[0], -1, -1)
        references = boxes.detach()
        if not self.training or batch is None:
            return DecoderStart(query, None, references)
        denoising = self.dn_query_generator(batch.targets)
        return DecoderStart(
            query=torch.cat((denoising.query, query), dim=1),
            query_pos=None,
            references=torch.cat((denoising.references, references), dim=1),
            encoder_logits=in_full_precision(classify, features),
            encoder_boxes=boxes,
            denoising=denoising,
            self_attn_mask=denoising.mask(query.shape[1]),
        )

    def assign(self, costs: dict[str, Tensor], batch: TrainingBatch) -> dict[str, Tensor]:
        counts = batch.targets.lengths
        made = counts.sum() * self.dn_query_generator.num_groups(counts.max())
        return {**super().assign(costs, batch), "dn_num_boxes": self.bbox_head.divisors(made)}
