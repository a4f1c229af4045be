"""The head of Deformable DETR, which predicts classes and boxes from the decoder's hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from mmengine.model import BaseModule, bias_init_with_prob, constant_init
from torch import Tensor, nn

from visdet.checks.arguments import Positive, checked_value
from visdet.errors import InvalidInputError
from visdet.registry import MODELS, TASK_UTILS

from ..box_coders import UprightBoxCoder
from ..layers.feed_forward import relu_perceptron
from ..layers.linear import are_alike, each_of_its_own
from ..layers.precision import at_least_float32, in_full_precision, in_type_of, without_autocast
from ..matching.assignment import for_solver, mean_count, solve_padded
from ..matching.padded_targets import PaddedTargets
from ..rows import rows_at
from .decoder_start import DecoderStart
from .transformer import LOGIT

_FOCAL = {"type": "FocalLoss", "use_sigmoid": True, "gamma": 2.0, "alpha": 0.25, "loss_weight": 2.0}
_L1 = {"type": "L1Loss", "loss_weight": 5.0}
_GIOU = {"type": "GIoULoss", "loss_weight": 2.0}
_TRAIN = {
    "assigner": {
        "type": "HungarianAssigner",
        "match_costs": [
            {"type": "FocalLossCost", "weight": 2.0},
            {"type": "BBoxL1Cost", "weight": 5.0, "box_format": "xywh"},
            {"type": "IoUCost", "iou_mode": "giou", "weight": 2.0},
        ],
    }
}
_TEST = {"max_per_img": 100}
# This is the probability of each class before training. It is low, so that negatives do not dominate the first steps.
_PRIOR_PROBABILITY = 0.01


class SetPrediction(NamedTuple):
    """Predictions of D layers that get a loss.

    Attributes:
        logits: [D, B, Q, C], in float32 or a wider dtype. boxes: [D, B, Q, box_dim] of the network, likewise.
        targets: [B, Q], the targets of queries that were made of ground truth, or None if the assigner finds them.
        is_counted: [Q] bool, False for such queries without a loss.
    """

    logits: Tensor
    boxes: Tensor
    targets: Tensor | None = None
    is_counted: Tensor | None = None


@MODELS.register_module()
class DeformableDETRHead(BaseModule):
    """One classification branch and one regression branch per decoder layer, with the set loss of their predictions.

    Args:
        num_classes: number C of classes without background.
        embed_dims: channels of the hidden states.
        num_reg_fcs: number of hidden linear layers of a regression branch.
        sync_cls_avg_factor: whether the class loss is divided by the mean number of boxes over all processes, instead
            of the number in this process.
        loss_cls: loss of class logits, which must be a sigmoid loss (``use_sigmoid=True``).
        loss_bbox: loss of boxes of the network. loss_iou: loss of boxes in pixels.
        train_cfg: a dict with ``assigner``. test_cfg: a dict with ``max_per_img``.
        share_pred_layer: whether all layers share one pair of branches. The detector sets this and the following two.
        num_pred_layer: number of pairs of branches.
        as_two_stage: whether the last pair of branches belongs to the encoder's proposals.
        box_coder: what a box is, by default an ``UprightBoxCoder``. The detector sets it.

    Raises:
        ValueError: ``num_classes`` is less than 1, ``loss_cls`` is not a sigmoid loss, or a loss or a cost is of other
            boxes than those of the ``box_coder``.

    Source: Zhu et al., Deformable DETR; names and defaults are mmdet's.
    """

    proposals_have_classes = False

    def __init__(
        self,
        num_classes: Positive,
        embed_dims: int = 256,
        num_reg_fcs: int = 2,
        sync_cls_avg_factor: bool = False,
        loss_cls: dict[str, Any] = _FOCAL,
        loss_bbox: dict[str, Any] = _L1,
        loss_iou: dict[str, Any] = _GIOU,
        train_cfg: dict[str, Any] | None = _TRAIN,
        test_cfg: dict[str, Any] | None = _TEST,
        share_pred_layer: bool = False,
        num_pred_layer: int = 6,
        as_two_stage: bool = False,
        init_cfg: dict[str, Any] | None = None,
        box_coder: UprightBoxCoder | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.box_coder = box_coder or UprightBoxCoder()
        box_dim = self.box_coder.box_dim
        self.num_classes = num_classes
        self.embed_dims = embed_dims
        self.sync_cls_avg_factor = sync_cls_avg_factor
        self.as_two_stage = as_two_stage
        self.test_cfg = dict(test_cfg or {})
        checked_value(
            "DeformableDETRHead: test_cfg['max_per_img']", self.test_cfg.get("max_per_img", 1), Positive
        )
        self.assigner: Any = TASK_UTILS.build(train_cfg["assigner"]) if train_cfg else None
        self.loss_cls = MODELS.build(loss_cls)
        self.loss_bbox = MODELS.build(loss_bbox)
        self.loss_iou = MODELS.build(loss_iou)
        if not getattr(self.loss_cls, "use_sigmoid", False):
            raise InvalidInputError(
                f"DeformableDETRHead: loss_cls must have use_sigmoid=True, got {loss_cls}"
            )
        for part in (self.loss_bbox, self.loss_iou, *getattr(self.assigner, "match_costs", ())):
            own = getattr(part, "box_dim", UprightBoxCoder.box_dim) or box_dim
            if own != box_dim:
                raise InvalidInputError(
                    f"DeformableDETRHead: loss_bbox, loss_iou and match_costs must be of boxes of {box_dim} numbers, "
                    f"as {type(self.box_coder).__name__} has them, got {type(part).__name__}, which is of {own}"
                )

        distinct = 1 if share_pred_layer else num_pred_layer
        repeats = num_pred_layer // distinct
        self.cls_branches = nn.ModuleList(
            [nn.Linear(embed_dims, num_classes) for _ in range(distinct)] * repeats
        )
        self.reg_branches = nn.ModuleList(
            [relu_perceptron(embed_dims, num_reg_fcs, box_dim) for _ in range(distinct)] * repeats
        )
        # The layers of which each row belongs to a class. That of proposals without classes only tells objects apart.
        tells_apart = as_two_stage and not share_pred_layer and not self.proposals_have_classes
        num_with_classes = num_pred_layer - tells_apart
        self.class_rows = {"classes": [f"cls_branches.{layer}" for layer in range(num_with_classes)]}

    def init_weights(self) -> None:
        """Initialise the branches so that classes are improbable and boxes equal their references.

        Reference points get boxes whose sides are sigmoid(-2) of the image.
        """
        classify: Any
        branches: Any = self.reg_branches
        for classify in self.cls_branches:
            nn.init.constant_(classify.bias, bias_init_with_prob(_PRIOR_PROBABILITY))
        last_layers = [branch[-1] for branch in branches]
        for layer in last_layers:
            constant_init(layer, 0.0)
        if not self.as_two_stage:
            nn.init.constant_(last_layers[0].bias[2:4], -2.0)
        self.is_init = True

    def forward(self, hidden_states: Tensor, references: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return class logits [D, B, Q, C] and boxes [D, B, Q, box_dim] of every decoder layer.

        Args:
            hidden_states: [D, B, Q, embed_dims].
            references: at least D tensors [B, Q, 2 or box_dim], the references that each layer started from.
        """
        depth = len(hidden_states)
        references = references[:depth]
        if len(set(self.reg_branches)) == 1:
            return self.decode(0, hidden_states, torch.stack(list(references)))
        if hidden_states.is_cuda and torch.is_grad_enabled():
            classify: list[Any] = [[branch] for branch in self.cls_branches[:depth]]
            regress: list[Any] = list(self.reg_branches[:depth])
            sizes = {reference.shape for reference in references}
            if len(sizes) == 1 and are_alike(classify) and are_alike(regress):
                return self._decode_together(classify, regress, hidden_states, references)
        layers = [self.decode(index, hidden, references[index]) for index, hidden in enumerate(hidden_states)]
        logits, boxes = zip(*layers, strict=True)
        return torch.stack(logits), torch.stack(boxes)

    def branches(self, layer: int) -> tuple[nn.Module, nn.Module]:
        """Return the branches of classification and of regression of a layer. Those of proposals come last."""
        return self.cls_branches[layer], self.reg_branches[layer]

    def _decode_together(
        self,
        classify: Sequence[Sequence[nn.Module]],
        regress: Sequence[Sequence[nn.Module]],
        hidden_states: Tensor,
        references: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return what ``forward`` does, the branches of all layers side by side."""
        with without_autocast(hidden_states):
            rows = in_type_of(self, hidden_states.flatten(1, 2))
            logits, deltas = (
                each_of_its_own(chains, rows).unflatten(1, hidden_states.shape[1:3])
                for chains in (classify, regress)
            )
        return logits, self.box_coder.refined(deltas, torch.stack(list(references)), LOGIT)

    def decode(self, layer: int, hidden: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [..., C] and boxes [..., box_dim] by a layer's branches from hidden states [...]."""
        classify, regress = self.branches(layer)
        boxes = self.box_coder.refined(in_full_precision(regress, hidden), reference, LOGIT)
        return in_full_precision(classify, hidden), boxes

    def set_predictions(
        self, hidden_states: Tensor, references: Sequence[Tensor], start: DecoderStart
    ) -> dict[str, SetPrediction]:
        """Return the predictions that get losses.

        The key "" holds the predictions of the decoder layers, ``"dn_"`` those of the denoising queries among them, and
        ``"enc_"`` the encoder's proposals, if there are any.

        Args:
            hidden_states, references: as in ``forward``. start: what the decoder started from.
        """
        logits, boxes = map(at_least_float32, self(hidden_states, references))
        sets = {"": SetPrediction(logits, boxes)}
        if start.denoising is not None:
            _, _, targets, is_counted, _ = start.denoising
            count = len(is_counted)
            dn_logits, logits = logits.tensor_split([count], dim=2)
            dn_boxes, boxes = boxes.tensor_split([count], dim=2)
            sets = {
                "": SetPrediction(logits, boxes),
                "dn_": SetPrediction(dn_logits, dn_boxes, targets, is_counted),
            }
        if start.encoder_logits is not None and start.encoder_boxes is not None:
            encoder = (
                at_least_float32(value.unsqueeze(0)) for value in (start.encoder_logits, start.encoder_boxes)
            )
            sets["enc_"] = SetPrediction(*encoder)
        return sets

    def targets_of(self, name: str, targets: PaddedTargets) -> PaddedTargets:
        """Return the targets of a set. For the encoder's proposals, class 0 stands for any object."""
        return replace(targets, labels=torch.zeros_like(targets.labels)) if name == "enc_" else targets

    @torch.no_grad()
    def costs(self, sets: Mapping[str, SetPrediction], targets: PaddedTargets) -> dict[str, Tensor]:
        """Return the cost of every pair of a prediction and a target for the solver, by the name of the set.

        Sets whose targets are known have none.

        Returns:
            [D, B, N, Q] of each set, see ``for_solver``.
        """
        result = {}
        for name, (logits, boxes, known, _) in sets.items():
            if known is None:
                boxes_px = self.box_coder.to_pixels(boxes, targets.image_whwh)
                result[name] = for_solver(
                    self.assigner.cost(logits, boxes_px, self.targets_of(name, targets))
                )
        return result

    def assign(self, costs: Mapping[str, Tensor], targets: PaddedTargets) -> dict[str, Tensor]:
        """Return, for each set, the target of every prediction and the numbers that divide its losses.

        The assignments are solved where the costs are, and on a GPU, the host does not wait for them.

        Returns:
            for each set NAME, NAMEindex [D, B, Q], the result of ``solve_padded``, and NAMEnum_boxes [2],
            the divisors of the class loss and of the other losses.
        """
        result = {}
        for name, cost in costs.items():
            result[f"{name}index"] = solve_padded(cost, targets.lengths)
            result[f"{name}num_boxes"] = self.divisors(targets.lengths.clamp(max=cost.shape[-1]).sum())
        return result

    def divisors(self, matched: Tensor) -> Tensor:
        """Return the divisors [2] of the class loss and of the other losses for a number of matched predictions."""
        num_boxes = matched.float()
        mean_boxes = mean_count(num_boxes)
        cls_boxes = mean_boxes if self.sync_cls_avg_factor else num_boxes.clamp(min=1.0)
        return torch.stack((cls_boxes, mean_boxes))

    def losses(
        self, sets: Mapping[str, SetPrediction], targets: PaddedTargets, assignment: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return ``loss_cls``, ``loss_bbox`` and ``loss_iou`` of the last layer, each a scalar.

        The losses of the other layers are called ``d0.loss_cls`` and so on, those of the encoder's proposals
        ``enc_loss_cls`` and so on, and those of the denoising queries ``dn_loss_cls``, ``d0.dn_loss_cls`` and so on.

        Args:
            sets, targets: as in ``costs``.
            assignment: the result of ``assign``, which also has the divisors of sets whose targets are known.
        """
        result = {}
        for name, prediction in sets.items():
            index = assignment[f"{name}index"] if prediction.targets is None else prediction.targets
            num_layers = len(prediction.logits)
            index = index.expand(num_layers, -1, -1)
            num_boxes = assignment[f"{name}num_boxes"]
            by_layer = self._set_losses(prediction, self.targets_of(name, targets), index, num_boxes)
            last = num_layers - 1
            for layer, losses in enumerate(zip(*by_layer.values(), strict=True)):
                prefix = name if layer == last else f"d{layer}.{name}"
                result.update({f"{prefix}{kind}": loss for kind, loss in zip(by_layer, losses, strict=True)})
        return result

    def _set_losses(
        self, prediction: SetPrediction, targets: PaddedTargets, index: Tensor, num_boxes: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses [D] of D layers, each with its own matching.

        Predictions without a target get a weight of 0 in the box losses, so that shapes do not depend on the matching.
        """
        logits, boxes, _, is_counted = prediction
        labels, true_px = targets.of_predictions(index, background=self.num_classes)
        is_matched = labels < self.num_classes
        loss_cls = self.loss_cls(logits.flatten(0, 2), labels.flatten(), reduction_override="none")
        true = self.box_coder.to_unit(true_px, targets.image_whwh)
        loss_bbox = self.loss_bbox(boxes, true, reduction_override="none")
        boxes_px = self.box_coder.to_pixels(boxes, targets.image_whwh)
        loss_iou = self.loss_iou(boxes_px, true_px, reduction_override="none")
        if is_counted is not None:
            loss_cls = loss_cls.view_as(logits) * is_counted.unsqueeze(-1)
        class_divisor, box_divisor = num_boxes
        loss_cls = loss_cls.reshape(len(index), -1).sum(1) / class_divisor
        loss_bbox = (loss_bbox * is_matched.unsqueeze(-1)).flatten(1).sum(1) / box_divisor
        loss_iou = (loss_iou * is_matched).flatten(1).sum(1) / box_divisor
        return {"loss_cls": loss_cls, "loss_bbox": loss_bbox, "loss_iou": loss_iou}

    def detections(
        self, hidden_states: Tensor, references: Sequence[Tensor], limit: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Return the ``max_per_img`` best (query, class) pairs of each image, the best first.

        All work runs on the device.

        Args:
            hidden_states, references: as in ``forward``. Only those of the last layer are used.
            limit: [B, 1, 4], the (width, height, width, height) of the images, to which boxes are clipped.
            scale: [B, 1, 4], by which clipped boxes are divided.

        Returns:
            "bboxes" [B, K, box_dim] in pixels, "scores" [B, K] and "labels" [B, K].
        """
        last = len(hidden_states) - 1
        logits, boxes = self.decode(last, hidden_states[last], references[last])
        scores = at_least_float32(logits).sigmoid().flatten(1)
        scores, pairs = scores.topk(min(self.test_cfg.get("max_per_img", logits.shape[1]), scores.shape[1]))
        query = torch.div(pairs, self.num_classes, rounding_mode="floor")
        boxes = self.box_coder.detected(rows_at(query, at_least_float32(boxes)), limit, scale)
        return {"bboxes": boxes, "scores": scores, "labels": pairs % self.num_classes}
