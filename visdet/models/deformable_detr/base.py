"""The base of the detectors with deformable attention and a decoder of queries."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.execution.staged_detector import StagedDetector
from visdet.registry import MODELS, TASK_UTILS, built
from visdet.structures import DetDataSample

from ..base_detector import BaseDetector, image_sizes, scale_factors
from ..box_coders import UprightBoxCoder
from ..layers.as_if_unpadded import Padding, takes_padding
from ..layers.normalization import LayerNorm
from ..matching.padded_targets import PaddedTargets, room_for
from ..transfer import to_device
from .decoder_start import DecoderStart
from .flat_pyramid import FlatPyramid, flatten_pyramid
from .head import SetPrediction

# Least number of boxes per image after padding. Each number is a shape of its own for CUDA graphs.
_LEAST_ROOM, _LEAST_ROOM_ON_GPU = 8, 64


class CannotIgnorePadding(UserWarning):
    """A model predicts padded images, and its features depend on the padding."""


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
        as_if_unpadded: whether each image is predicted as if it were a batch of its own.
    """

    images: Tensor
    image_sizes: Tensor | None
    limit: Tensor
    scale: Tensor
    as_if_unpadded: bool = False


def padded_sizes(
    inputs: Tensor, sizes: Sequence[tuple[int, int]], may_be_padded: bool | None = None
) -> Tensor | None:
    """Return the (height, width) [B, 2] of images on their device, or None if no image is padded.

    If others of this size ``may_be_padded``, the sizes are always returned, so that all have one layout.
    """
    if not may_be_padded and all(size == inputs.shape[-2:] for size in sizes):
        return None
    return to_device(sizes, inputs.device)


def _built(config: dict[str, Any], **defaults: Any) -> Any:
    return MODELS.build({**defaults, **config})


class DeformableDetectionTransformer(StagedDetector, BaseDetector):
    """The base class of Deformable DETR and its descendants.

    images -> backbone -> neck -> flat pyramid -> encoder -> start of the decoder -> decoder -> head.

    A subclass says how the decoder starts (``decoder_start``) and which decoder there is by default.

    Args:
        backbone, neck: configs. The neck returns ``num_feature_levels`` maps with the encoder's ``embed_dims``.
        encoder: config of the encoder, by default a ``DeformableDetrTransformerEncoder``.
        decoder: config of the decoder, by default a ``decoder_type``.
        positional_encoding: config of the encoding of pixels, by default a ``SinePositionalEncoding``. Its
            ``num_feats`` is half the encoder's ``embed_dims``.
        bbox_head: config of the head. Its ``embed_dims`` is the encoder's by default.
        num_queries: number of queries of the decoder.
        train_cfg, test_cfg: those of the head.
        data_preprocessor: config of a ``DetDataPreprocessor``.
        with_box_refine: whether every decoder layer has its own branches and refines the boxes of the layer before.
        as_two_stage: whether the decoder starts from the encoder's best proposals instead of learned references.
        only_usable_proposals: whether pixels of the border and of padding become queries only after all others. If not,
            they are ranked, too, as in mmdet. An untrained encoder may then choose nothing else, whose boxes get no
            gradient, so that a model that is trained from scratch learns nothing with some seeds.
        num_feature_levels: number of levels of the pyramid.
        box_coder: config of what a box is, by default an ``UprightBoxCoder``. Losses and costs must fit.

    Raises:
        ValueError: the widths or levels of the parts do not fit together.

    Source: Zhu et al., Deformable DETR, ICLR 2021; keywords and parameter names are mmdet's.
    """

    decoder_type = "DeformableDetrTransformerDecoder"
    assigns_all_pixels = (
        False  # whether the proposals of all pixels are assigned to ground truth, not the best alone
    )

    def __init__(
        self,
        backbone: dict[str, Any],
        neck: dict[str, Any] | None = None,
        *,
        encoder: dict[str, Any],
        decoder: dict[str, Any],
        positional_encoding: dict[str, Any],
        bbox_head: dict[str, Any],
        num_queries: int = 100,
        train_cfg: dict[str, Any] | None = None,
        test_cfg: dict[str, Any] | None = None,
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
        with_box_refine: bool = False,
        as_two_stage: bool = False,
        only_usable_proposals: bool = False,
        num_feature_levels: int = 4,
        box_coder: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.box_coder: UprightBoxCoder = built(box_coder, TASK_UTILS) or UprightBoxCoder()
        self.num_queries = num_queries
        self.with_box_refine = with_box_refine
        self.as_two_stage = as_two_stage
        self.only_usable_proposals = only_usable_proposals
        self.backbone = MODELS.build(backbone)
        self.neck = nn.Identity() if neck is None else MODELS.build(neck)
        self.encoder = _built(encoder, type="DeformableDetrTransformerEncoder")
        self.decoder = _built(decoder, type=self.decoder_type, box_coder=self.box_coder)
        self.positional_encoding = _built(positional_encoding, type="SinePositionalEncoding")
        self.embed_dims = self.encoder.embed_dims
        head = {
            **bbox_head,
            "train_cfg": train_cfg,
            "test_cfg": test_cfg,
            "share_pred_layer": not with_box_refine,
            "num_pred_layer": self.decoder.num_layers + as_two_stage,
            "as_two_stage": as_two_stage,
            "box_coder": self.box_coder,
        }
        self.bbox_head = _built(head, embed_dims=self.embed_dims)
        for name, value, of_others in (
            ("decoder embed_dims", self.decoder.embed_dims, self.embed_dims),
            ("bbox_head.embed_dims", self.bbox_head.embed_dims, self.embed_dims),
            ("2 * positional_encoding.num_feats", 2 * self.positional_encoding.num_feats, self.embed_dims),
            ("num_levels of encoder and decoder", self.decoder.num_levels, self.encoder.num_levels),
            ("num_feature_levels", num_feature_levels, self.encoder.num_levels),
        ):
            if value != of_others:
                raise InvalidInputError(
                    f"{type(self).__name__}: {name} must be that of the encoder, {of_others}, got {value}"
                )
        self.level_embed = nn.Parameter(torch.randn(num_feature_levels, self.embed_dims))
        if as_two_stage:
            self.memory_trans_fc = nn.Linear(self.embed_dims, self.embed_dims)
            self.memory_trans_norm = LayerNorm(self.embed_dims)

    def init_weights(self) -> None:
        """Initialise the weights of all parts, each by its own rule."""
        super().init_weights()
        nn.init.normal_(self.level_embed)
        if self.as_two_stage:
            nn.init.xavier_uniform_(self.memory_trans_fc.weight)

    def training_batch(self, inputs: Tensor, data_samples: Sequence[DetDataSample]) -> TrainingBatch:
        """Return images and targets as tensors.

        The boxes of each image are padded to the number that the batch's plan says. Without a plan, that is a multiple
        of 8. On a GPU it is a power of two, at least 64, or 8 if the proposals of all pixels are assigned, too.
        """
        sizes = image_sizes(inputs, data_samples)
        plan = data_samples[0].metainfo
        targets = PaddedTargets.from_samples(data_samples, sizes, inputs.device, self.box_coder.box_dim)
        most = max(targets.counts)
        if inputs.is_cuda:
            room = room_for(most, _LEAST_ROOM if self.assigns_all_pixels else _LEAST_ROOM_ON_GPU)
        else:
            room = max(math.ceil(most / _LEAST_ROOM), 1) * _LEAST_ROOM
        room = next((n for n in plan.get("batch_boxes", ()) if n >= most), room)
        targets = targets.padded_to(room).with_labels_below(self.bbox_head.num_classes)
        may_be_padded = plan.get("batch_is_padded", False)
        return TrainingBatch(inputs, padded_sizes(inputs, sizes, may_be_padded), targets)

    def predictions_and_costs(
        self, batch: TrainingBatch
    ) -> tuple[dict[str, SetPrediction], dict[str, Tensor]]:
        """Return the head's predictions and the costs of assigning them. All work runs on the device."""
        hidden_states, references, start = self.forward_transformer(batch.images, batch.image_sizes, batch)
        predictions = self.bbox_head.set_predictions(hidden_states, references, start)
        return predictions, self.bbox_head.costs(predictions, batch.targets)

    def assign(self, costs: dict[str, Tensor], batch: TrainingBatch) -> dict[str, Tensor]:
        """Return the assignment of least cost as tensors, which a kernel computes for costs on a GPU."""
        return self.bbox_head.assign(costs, batch.targets)

    def check(self, batch: TrainingBatch) -> None:
        """Raise an InvalidInputError if a label is not a class. The host waits for the batch to be on the device."""
        if batch.targets.has_unknown_label:
            classes = self.bbox_head.num_classes
            raise InvalidInputError(
                f"loss: gt_instances.labels must lie in 0..{classes - 1} (num_classes={classes})"
            )

    def losses(
        self, predictions: dict[str, SetPrediction], batch: TrainingBatch, assignment: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the losses by name. All work runs on the device."""
        return self.bbox_head.losses(predictions, batch.targets, assignment)

    def prediction_batch(self, inputs: Tensor, data_samples: Sequence[DetDataSample]) -> PredictionBatch:
        """Return the images and the sizes by which their boxes are clipped and scaled, as tensors.

        Boxes are divided by the ``scale_factor`` (width, height) of a sample, which converts them to pixels of the
        original image. If there is none, they stay in pixels of the network's input.
        """
        sizes = image_sizes(inputs, data_samples)
        factors = scale_factors(data_samples)
        limits = [[width, height] for height, width in sizes]
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        limit, scale = to_device([limits, factors], inputs.device, dtype).repeat(1, 1, 2).unsqueeze(-2)
        plan = data_samples[0].metainfo
        may_be_padded = plan.get("batch_is_padded")  # None if nothing is known of the batch
        padded = padded_sizes(inputs, sizes, may_be_padded)
        if may_be_padded and not self.can_ignore_padding:
            self._say_that_padding_counts(is_planned="batch_boxes" in plan)
        alone = may_be_padded is not None and self.can_ignore_padding
        return PredictionBatch(inputs, padded, limit, scale, alone)

    def detections(self, batch: PredictionBatch) -> dict[str, Tensor]:
        """Return "bboxes" [B, K, box_dim], "scores" [B, K] and "labels" [B, K]. All work runs on the device."""
        hidden_states, references, _ = self.forward_transformer(
            batch.images, batch.image_sizes, as_if_unpadded=batch.as_if_unpadded
        )
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

    def _say_that_padding_counts(self, is_planned: bool) -> None:
        """Raise an error for a planned batch, whose images are padded even if they are alone, or else warn once."""
        parts = f"{type(self.backbone).__name__} and {type(self.neck).__name__}"
        if is_planned:
            raise InvalidInputError(
                "a PlannedBatchSampler in val_dataloader or test_dataloader needs a ResNet and a ChannelMapper, whose "
                f"maps then do not depend on the padding, got {parts}: set batch_sampler=None"
            )
        warnings.warn(
            f"the predictions of padded images depend on the padding, which {parts} cannot leave out. Batches of one "
            "image are exact: batch_size=1",
            CannotIgnorePadding,
            stacklevel=3,
        )

    @property
    def can_ignore_padding(self) -> bool:
        """Whether a padded image can be predicted ``as_if_unpadded``."""
        return takes_padding(self.backbone) and takes_padding(self.neck)

    def raw_outputs(
        self, inputs: Tensor, data_samples: Sequence[DetDataSample] | None
    ) -> tuple[Tensor, Tensor]:
        """Return class logits [D, B, Q, C] and the boxes [D, B, Q, box_dim] of D decoder layers."""
        sizes = padded_sizes(inputs, image_sizes(inputs, data_samples))
        hidden_states, references, _ = self.forward_transformer(inputs, sizes)
        return self.bbox_head(hidden_states, references)

    def forward_transformer(
        self,
        inputs: Tensor,
        sizes: Tensor | None,
        batch: TrainingBatch | None = None,
        as_if_unpadded: bool = False,
    ) -> tuple[Tensor, list[Tensor], DecoderStart]:
        """Return the decoder's hidden states [D, B, Q, C], its D + 1 references, and its inputs.

        Args:
            inputs: [B, 3, H, W].
            sizes: [B, 2], the (height, width) of the images without padding, or None if no image is padded.
            batch: the batch of a training step, whose ground truth the start of the decoder may use.
            as_if_unpadded: whether each image is computed as if it were a batch of its own.
        """
        size: Any = tuple(inputs.shape[-2:])
        padding = Padding(sizes, size) if as_if_unpadded and sizes is not None else None
        maps = self.extract_feat(inputs, padding)
        pyramid = flatten_pyramid(maps, sizes, size, self.positional_encoding, self.level_embed, padding)
        memory = self.encoder(pyramid)
        start = self.decoder_start(memory, pyramid, batch)
        hidden_states, all_references = self.decoder(
            start.query,
            start.query_pos,
            memory,
            start.references,
            pyramid,
            reg_branches=self.bbox_head.reg_branches if self.with_box_refine else None,
            self_attn_mask=start.self_attn_mask,
        )
        return hidden_states, all_references, start

    @abstractmethod
    def decoder_start(
        self, memory: Tensor, pyramid: FlatPyramid, batch: TrainingBatch | None = None
    ) -> DecoderStart:
        """Return the inputs of the decoder.

        Args:
            memory: [B, S, C], the output of the encoder. pyramid: the pyramid that the encoder has read.
            batch: the batch of a training step, or None.
        """

    def proposal_features(self, memory: Tensor, usable: Tensor) -> Tensor:
        """Return the features [B, K, C] from which proposals are predicted.

        Args:
            memory: [B, K, C], pixels of the encoder's output. usable: [B, K, 1] bool, see ``pixel_proposals``.
        """
        return self.memory_trans_norm(self.memory_trans_fc(memory.masked_fill(~usable, 0.0)))

    def best_pixels(self, scores: Tensor, usable: Tensor, pyramid: FlatPyramid) -> Tensor:
        """Return the pixels [B, K] that become queries, given the scores [B, S] of all.

        Padding takes part, as in mmdet, unless images are computed as if they were not padded, or only usable pixels
        [B or 1, S, 1] shall be chosen.
        """
        is_left_out = pyramid.padding_mask if pyramid.is_as_if_unpadded else None
        if self.only_usable_proposals:
            is_left_out = ~usable.squeeze(-1)
        if is_left_out is not None:
            scores = scores.masked_fill(is_left_out, -math.inf)
        return scores.topk(min(self.num_queries, scores.shape[1]), dim=1).indices

    def extract_feat(self, inputs: Tensor, padding: Padding | None = None) -> tuple[Tensor, ...]:
        """Return the neck's maps [B, C, H_l, W_l] of images [B, 3, H, W], with a ``padding`` those of each alone."""
        known = () if padding is None else (padding,)
        maps = self.neck(self.backbone(inputs, *known), *known)
        widths = [feature_map.shape[1] for feature_map in maps]
        count = len(self.level_embed)
        if widths != [self.embed_dims] * count:
            raise InvalidInputError(
                f"{type(self).__name__}: the neck must give {count} maps of {self.embed_dims} channels "
                f"(num_feature_levels, embed_dims), got maps of {widths} channels"
            )
        return maps
