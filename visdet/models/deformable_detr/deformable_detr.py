"""The detector Deformable DETR."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from mmengine.model import xavier_init
from mmengine.structures import InstanceData
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS
from visdet.structures import DetDataSample

from ..base_detector import BaseDetector, image_sizes
from ..layers.normalization import LayerNorm
from ..layers.positional_encoding import SinePositionalEncoding
from ..layers.precision import in_full_precision
from ..matching.padded_targets import PaddedTargets
from ..transfer import to_device
from .flat_pyramid import FlatPyramid, flatten_pyramid
from .head import SetPrediction
from .proposals import pixel_proposals, proposal_embedding
from .transformer import DeformableDetrTransformerDecoder, DeformableDetrTransformerEncoder

__all__ = ["DecoderStart", "DeformableDETR", "PredictionBatch", "TrainingBatch"]

# Least number of boxes per image after padding. Each number is a shape of its own for CUDA graphs.
_LEAST_ROOM, _LEAST_ROOM_ON_GPU = 8, 64


class DecoderStart(NamedTuple):
    """The inputs of the decoder.

    Attributes:
        query, query_pos: [B, Q, C].
        references: [B, Q, 2] points, or in two stages [B, Q, 4] boxes (cx, cy, w, h), in 0..1 of the image.
        encoder_logits: [B, S, classes] of the proposals of all pixels, for the loss of the first stage. It is None
            outside training and without two stages.
        encoder_boxes: [B, S, 4] (cx, cy, w, h), likewise.
    """

    query: Tensor
    query_pos: Tensor
    references: Tensor
    encoder_logits: Tensor | None = None
    encoder_boxes: Tensor | None = None


@dataclass(frozen=True)
class TrainingBatch:
    """Images and their ground truth.

    Attributes:
        images: [B, 3, H, W].
        image_sizes: [B, 2], the (height, width) without padding, or None if no image is padded.
        targets: the ground truth of the images.
    """

    images: Tensor
    image_sizes: Tensor | None
    targets: PaddedTargets


@dataclass(frozen=True)
class PredictionBatch:
    """Images, and the sizes by which their boxes are clipped and scaled.

    Attributes:
        images, image_sizes: as in ``TrainingBatch``.
        limit: [B, 1, 4], the (width, height, width, height) of the images without padding, in pixels.
        scale: [B, 1, 4], the size of these images divided by that of the original images, in the same order.
    """

    images: Tensor
    image_sizes: Tensor | None
    limit: Tensor
    scale: Tensor


def padded_sizes(inputs: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor | None:
    """Return the (height, width) [B, 2] of images on their device, or None if no image is padded."""
    if all(tuple(size) == tuple(inputs.shape[-2:]) for size in sizes):
        return None
    return to_device(sizes, inputs.device)


def _given(name: str, config: dict[str, Any] | None) -> dict[str, Any]:
    if config is None:
        raise InvalidInputError(f"DeformableDETR: {name} must be given")
    return config


@MODELS.register_module()
class DeformableDETR(BaseDetector):
    """Deformable DETR, which can use iterative box refinement and two stages.

    images -> backbone -> neck -> flat pyramid -> encoder -> start of the decoder -> decoder -> head.

    Args:
        backbone, neck: configs. The neck returns ``num_feature_levels`` maps with the encoder's ``embed_dims``.
        encoder, decoder: keywords of ``DeformableDetrTransformerEncoder`` and ``DeformableDetrTransformerDecoder``.
        positional_encoding: keywords of ``SinePositionalEncoding``. Its ``num_feats`` is half the encoder's
            ``embed_dims``.
        bbox_head: config of the head. Its ``embed_dims`` is the encoder's by default.
        num_queries: number of queries of the decoder.
        train_cfg, test_cfg: those of the head.
        data_preprocessor: config of a ``DetDataPreprocessor``.
        with_box_refine: whether every decoder layer has its own branches and refines the boxes of the layer before.
        as_two_stage: whether the decoder starts from the encoder's best proposals instead of learned queries.
        num_feature_levels: number of levels of the pyramid.

    Raises:
        ValueError: a required config is missing, or the widths or levels of the parts do not fit together.

    Source: Zhu et al., Deformable DETR, ICLR 2021; keywords and parameter names are mmdet's. Two things differ: two
    stages work with any ``embed_dims`` that is a multiple of 4, and predictions for a sample without ``scale_factor``
    stay in pixels of the network's input.
    """

    def __init__(
        self,
        backbone: dict[str, Any],
        neck: dict[str, Any] | None = None,
        encoder: dict[str, Any] | None = None,
        decoder: dict[str, Any] | None = None,
        positional_encoding: dict[str, Any] | None = None,
        bbox_head: dict[str, Any] | None = None,
        num_queries: int = 100,
        train_cfg: dict[str, Any] | None = None,
        test_cfg: dict[str, Any] | None = None,
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
        with_box_refine: bool = False,
        as_two_stage: bool = False,
        num_feature_levels: int = 4,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        encoder, decoder = _given("encoder", encoder), _given("decoder", decoder)
        positional_encoding = _given("positional_encoding", positional_encoding)
        bbox_head = _given("bbox_head", bbox_head)
        self.num_queries = num_queries
        self.with_box_refine = with_box_refine
        self.as_two_stage = as_two_stage
        self.backbone = MODELS.build(backbone)
        self.neck = nn.Identity() if neck is None else MODELS.build(neck)
        self.encoder = DeformableDetrTransformerEncoder(**encoder)
        self.decoder = DeformableDetrTransformerDecoder(**decoder)
        self.positional_encoding = SinePositionalEncoding(**positional_encoding)
        self.embed_dims = self.encoder.embed_dims
        self.bbox_head = MODELS.build(
            {
                "embed_dims": self.embed_dims,
                **bbox_head,
                "train_cfg": train_cfg,
                "test_cfg": test_cfg,
                "share_pred_layer": not with_box_refine,
                "num_pred_layer": self.decoder.num_layers + int(as_two_stage),
                "as_two_stage": as_two_stage,
            }
        )
        self._check_widths(num_feature_levels)
        self.level_embed = nn.Parameter(torch.randn(num_feature_levels, self.embed_dims))
        if as_two_stage:
            self.memory_trans_fc = nn.Linear(self.embed_dims, self.embed_dims)
            self.memory_trans_norm = LayerNorm(self.embed_dims)
            self.pos_trans_fc = nn.Linear(self.embed_dims * 2, self.embed_dims * 2)
            self.pos_trans_norm = LayerNorm(self.embed_dims * 2)
        else:
            self.query_embedding = nn.Embedding(num_queries, self.embed_dims * 2)  # query_pos, then query
            self.reference_points_fc = nn.Linear(self.embed_dims, 2)

    def _check_widths(self, num_feature_levels: int) -> None:
        """Raise an error if the parts do not fit together, so that this is known before the first batch."""
        widths = {
            "decoder embed_dims": self.decoder.embed_dims,
            "bbox_head.embed_dims": self.bbox_head.embed_dims,
            "2 * positional_encoding.num_feats": 2 * self.positional_encoding.num_feats,
        }
        for name, width in widths.items():
            if width != self.embed_dims:
                raise InvalidInputError(
                    f"DeformableDETR: {name} must be the encoder's embed_dims {self.embed_dims}, got {width}"
                )
        for name, part in (("encoder", self.encoder), ("decoder", self.decoder)):
            if part.num_levels != num_feature_levels:
                raise InvalidInputError(
                    f"DeformableDETR: num_feature_levels is {num_feature_levels}, but the {name}'s deformable "
                    f"attention has num_levels={part.num_levels}"
                )

    def init_weights(self) -> None:
        """Initialise the weights of all parts, each by its own rule."""
        super().init_weights()
        nn.init.normal_(self.level_embed)
        if self.as_two_stage:
            nn.init.xavier_uniform_(self.memory_trans_fc.weight)
            nn.init.xavier_uniform_(self.pos_trans_fc.weight)
        else:
            nn.init.normal_(self.query_embedding.weight)
            xavier_init(self.reference_points_fc, distribution="uniform")

    def loss(self, inputs: Tensor, data_samples: Sequence[DetDataSample]) -> dict[str, Tensor]:
        batch = self.training_batch(inputs, data_samples)
        predictions, costs = self.predictions_and_costs(batch)
        return self.losses(predictions, batch, self.assign(costs, batch))

    def training_batch(self, inputs: Tensor, data_samples: Sequence[DetDataSample]) -> TrainingBatch:
        """Return images and targets as tensors.

        The boxes of each image are padded to a power of two. It is at least 8, and at least 64 on a GPU unless the
        proposals of all texels are assigned, too (``as_two_stage``).
        """
        sizes = image_sizes(inputs, data_samples)
        targets = PaddedTargets.from_samples(data_samples, sizes, inputs.device)
        least = _LEAST_ROOM_ON_GPU if inputs.is_cuda and not self.as_two_stage else _LEAST_ROOM
        room = 1 << max(max(targets.counts) - 1, least - 1).bit_length()
        targets = targets.padded_to(room).with_labels_below(self.bbox_head.num_classes)
        return TrainingBatch(inputs, padded_sizes(inputs, sizes), targets)

    def predictions_and_costs(
        self, batch: TrainingBatch
    ) -> tuple[dict[str, SetPrediction], dict[str, Tensor]]:
        """Return the head's predictions and the costs of assigning them. All work runs on the device."""
        hidden_states, references, start = self.forward_transformer(batch.images, batch.image_sizes)
        predictions = self.bbox_head.set_predictions(
            hidden_states, references, start.encoder_logits, start.encoder_boxes
        )
        return predictions, self.bbox_head.costs(predictions, batch.targets)

    def assign(self, costs: dict[str, Tensor], batch: TrainingBatch) -> dict[str, Tensor]:
        """Return the assignment of least cost as tensors, which a kernel computes for costs on a GPU."""
        return self.bbox_head.assign(costs, batch.targets)

    def losses(
        self, predictions: dict[str, SetPrediction], batch: TrainingBatch, assignment: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the losses by name. All work runs on the device."""
        return self.bbox_head.losses(predictions, batch.targets, assignment)

    def predict(self, inputs: Tensor, data_samples: Sequence[DetDataSample]) -> list[DetDataSample]:
        detections = self.detections(self.prediction_batch(inputs, data_samples))
        return self.with_detections(detections, data_samples)

    def prediction_batch(self, inputs: Tensor, data_samples: Sequence[DetDataSample]) -> PredictionBatch:
        """Return the images and the sizes by which their boxes are clipped and scaled, as tensors.

        Boxes are divided by the ``scale_factor`` (width, height) of a sample, which converts them to pixels of the
        original image. If there is none, they stay in pixels of the network's input.
        """
        sizes = image_sizes(inputs, data_samples)
        factors = []
        for sample in data_samples:
            factor = sample.metainfo.get("scale_factor")
            factors.append([1.0, 1.0] if factor is None else [float(number) for number in factor[:2]])
        limits = [[width, height] for height, width in sizes]
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        extents = to_device([limits, factors], inputs.device, dtype).unsqueeze(-2)
        limit, scale = torch.cat([extents, extents], dim=-1)
        return PredictionBatch(inputs, padded_sizes(inputs, sizes), limit, scale)

    def detections(self, batch: PredictionBatch) -> dict[str, Tensor]:
        """Return "bboxes" [B, K, 4], "scores" [B, K] and "labels" [B, K]. All work runs on the device."""
        hidden_states, references, _ = self.forward_transformer(batch.images, batch.image_sizes)
        return self.bbox_head.detections(hidden_states, references, batch.limit, batch.scale)

    def with_detections(
        self, detections: Mapping[str, Tensor], data_samples: Sequence[DetDataSample]
    ) -> list[DetDataSample]:
        """Fill the detections of each image into its sample and return the samples."""
        for index, sample in enumerate(data_samples):
            sample.pred_instances = InstanceData(
                **{name: tensor[index] for name, tensor in detections.items()}
            )
        return list(data_samples)

    def raw_outputs(
        self, inputs: Tensor, data_samples: Sequence[DetDataSample] | None
    ) -> tuple[Tensor, Tensor]:
        """Return class logits [D, B, Q, C] and boxes (cx, cy, w, h) [D, B, Q, 4] in 0..1 of D decoder layers."""
        sizes = padded_sizes(inputs, image_sizes(inputs, data_samples))
        hidden_states, references, _ = self.forward_transformer(inputs, sizes)
        return self.bbox_head(hidden_states, references)

    def forward_transformer(
        self, inputs: Tensor, sizes: Tensor | None
    ) -> tuple[Tensor, list[Tensor], DecoderStart]:
        """Return the decoder's hidden states [D, B, Q, C], its D + 1 references, and its inputs.

        Args:
            inputs: [B, 3, H, W].
            sizes: [B, 2], the (height, width) of the images without padding, or None if no image is padded.
        """
        height, width = inputs.shape[-2:]
        pyramid = flatten_pyramid(
            self.extract_feat(inputs), sizes, (height, width), self.positional_encoding, self.level_embed
        )
        memory = self.encoder(pyramid)
        start = self.proposals(memory, pyramid) if self.as_two_stage else self.learned_queries(len(inputs))
        hidden_states, references = self.decoder(
            start.query,
            start.query_pos,
            memory,
            start.references,
            pyramid,
            reg_branches=self.bbox_head.reg_branches if self.with_box_refine else None,
        )
        return hidden_states, references, start

    def extract_feat(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the neck's maps [B, C, H_l, W_l] of images [B, 3, H, W]."""
        return self.neck(self.backbone(inputs))

    def learned_queries(self, batch_size: int) -> DecoderStart:
        """Return the learned queries for each image, with the reference points that are predicted from them."""
        query_pos, query = (
            self.query_embedding.weight.unsqueeze(0).expand(batch_size, -1, -1).chunk(2, dim=-1)
        )
        return DecoderStart(
            query, query_pos, in_full_precision(self.reference_points_fc, query_pos).sigmoid()
        )

    def proposals(self, memory: Tensor, pyramid: FlatPyramid) -> DecoderStart:
        """Return the encoder's best proposals as inputs of the decoder. The logit of class 0 ranks them.

        Args:
            memory: [B, S, C], the output of the encoder.
            pyramid: the pyramid that the encoder has read.
        """
        classify, regress = self.bbox_head.cls_branches[-1], self.bbox_head.reg_branches[-1]
        origin, usable = pixel_proposals(pyramid)
        output_memory = self.memory_trans_norm(self.memory_trans_fc(memory.masked_fill(~usable, 0.0)))
        logits = in_full_precision(classify, output_memory)
        box_logits = in_full_precision(regress, output_memory) + origin
        best = logits[..., 0].topk(min(self.num_queries, logits.shape[1]), dim=1).indices
        best_boxes = box_logits.gather(1, best.unsqueeze(-1).expand(-1, -1, 4)).detach().sigmoid()
        embedding = proposal_embedding(best_boxes, self.embed_dims // 2).to(self.pos_trans_fc.weight.dtype)
        query_pos, query = self.pos_trans_norm(self.pos_trans_fc(embedding)).chunk(2, dim=-1)
        if not self.training:
            return DecoderStart(query, query_pos, best_boxes)
        return DecoderStart(query, query_pos, best_boxes, logits, box_logits.sigmoid())
