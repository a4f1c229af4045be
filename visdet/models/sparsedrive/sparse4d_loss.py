"""The losses of Sparse4D's head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visdet.errors import InvalidInputError

from ..layers.precision import without_autocast
from ..transfer import constants_on
from .base_target import Assignment, PaddedInstances, PairCosts


@dataclass
class Sparse4DLoss:
    """The criterion of a ``Sparse4DHead``: its ground truth, the costs of matching it, and the losses.

    There are losses of matched instances and of denoising queries.

    ``pair_costs`` and ``losses`` run on the device of one process alone. Between them, ``assigned_instances`` solves
    the assignments and averages the counts over the processes. Every process takes part in that, whatever its ground
    truth, so that no process waits for another one in vain.

    Attributes:
        num_classes: the least number of classes of the refinement layers, or None without one.
        learns: whether there are losses. Otherwise, only the predictions of the last layer are matched.
        others: see ``Sparse4DHead``.
    """

    sampler: Any
    loss_cls: Any
    loss_reg: Any
    reg_weights: tuple[float, ...]
    cls_threshold_to_reg: float
    num_single_frame_decoder: int
    task_prefix: str
    gt_cls_key: str
    gt_reg_key: str
    num_classes: int | None
    learns: bool = True

    def ground_truth(self, data: dict[str, Any], device: torch.device) -> PaddedInstances:
        """Return what ``data`` holds under ``gt_cls_key`` and ``gt_reg_key``, padded and on the device.

        Raises:
            InvalidInputError: a label on the host is not a class of the refinement layers.
        """
        key = self.gt_cls_key
        given = data[key]
        classes: Any = self.num_classes
        for index, labels in enumerate(given):
            # A GPU would stop with an assertion of a kernel, which names neither the sample nor the label. Labels that
            # are there already are not looked at, because the host would have to wait for them.
            is_checked = classes is not None and labels.is_cpu
            if is_checked and ((labels < 0) | (labels >= classes)).any():
                raise InvalidInputError(
                    f"loss: data_samples[{index}].{key} must lie in 0..{classes - 1}, "
                    f"got {labels.unique().tolist()}"
                )
        return self.sampler.ground_truth(given, data[self.gt_reg_key], device)

    def pair_costs(self, model_outs: dict[str, Any], truth: PaddedInstances) -> PairCosts:
        """Return what it costs to assign ``truth`` to the predictions of all decoder layers, or of the last one."""
        with without_autocast(truth.labels):
            cls, reg = _stacked(model_outs, first=0 if self.learns else -1)
            pairs = self.sampler.pair_costs(cls.detach(), reg[..., : len(self.reg_weights)].detach(), truth)
            valid = [is_valid.sum().float() for _, _, is_valid in self._denoising_targets(model_outs)]
            return pairs._replace(num_denoising=torch.stack(valid)) if valid else pairs

    def losses(
        self, model_outs: dict[str, Any], truth: PaddedInstances, pairs: PairCosts, assigned: Assignment
    ) -> dict[str, Tensor]:
        """Return ``{prefix}_loss_cls_{i}`` and the losses that ``loss_reg`` names, of each decoder layer i.

        All work runs on the device.

        Args:
            model_outs: the result of ``forward``. truth: the result of ``ground_truth``.
            pairs: the result of ``pair_costs`` for all layers. assigned: the result of ``assigned_instances`` for
            these.
        """
        if not self.learns:
            return {}
        with without_autocast(truth.labels):
            weights = self.reg_weights
            cls, reg = _stacked(model_outs)
            reg = reg[..., : len(weights)]
            num_layers = len(cls)
            num_positive = assigned.num_positive
            background = cls.shape[-1]
            cls_target, reg_target, reg_weight = self.sampler.targets_of(
                assigned.index, truth, pairs.ordering, background
            )
            # Constants go to the device once, and without waiting for it.
            reg_scale = constants_on(reg.device, weights, reg.dtype)
            reg_weight = reg_weight * reg_scale
            is_matched = cls_target < background
            losses = self._losses_of_layers(
                cls,
                reg,
                model_outs["quality"],
                (cls_target, reg_target, reg_weight, is_matched),
                num_positive[:num_layers],
            )
            queries = self._denoising_targets(model_outs)
            if queries:
                num_valid = num_positive[num_layers:]
                losses |= self._denoising_losses(model_outs, queries, num_valid, reg_scale)
            return losses

    def _losses_of_layers(
        self,
        cls: Tensor,
        reg: Tensor,
        quality: list[Any],
        targets: tuple[Tensor, Tensor, Tensor, Tensor],
        num_positive: Tensor,
    ) -> dict[str, Tensor]:
        """Return the losses of L layers by name, from tensors [L, B, N, ...]. num_positive [L] divides their sums.

        The quality is that of each layer, [B, N, 2] or None.
        """
        cls = cls.flatten(0, 2)
        reg = reg.flatten(0, 2)
        known = None if quality[0] is None else torch.stack(quality).float().flatten(0, 2)
        cls_target, reg_target, reg_weight, is_matched = (x.flatten(0, 2) for x in targets)
        background = cls.shape[-1]
        labels = torch.where(is_matched, cls_target, background)
        learns = is_matched
        threshold = self.cls_threshold_to_reg
        if threshold > 0:
            learns = learns & (cls.detach().amax(-1).sigmoid() > threshold)
        boxes = reg_target[..., : reg.shape[-1]].nan_to_num(nan=0.0)
        options = {"weight": reg_weight, "quality": known, "cls_target": cls_target, "mask": learns}
        return self._by_layer((cls, labels, None), (reg, boxes), num_positive, "_", **options)

    def _denoising_targets(self, model_outs: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (class, box, valid) of the queries, [n], [n, D] and [n].

        The list has two elements, for the layers before and after the queries of the previous frame have joined.
        Without denoising it is empty.
        """
        return [
            (label.flatten(0, 1), box.flatten(0, 1)[:, : len(self.reg_weights)], is_valid.flatten(0, 1))
            for label, box, is_valid in model_outs.get("dn_targets", ())
        ]

    def _denoising_losses(
        self,
        model_outs: dict[str, Any],
        queries: list[tuple[Tensor, Tensor, Tensor]],
        num_valid: Tensor,
        reg_scale: Tensor,
    ) -> dict[str, Tensor]:
        """Return the losses of the denoising queries of all layers by name. num_valid [2] divides their sums."""
        scores, boxes = _stacked(model_outs, prefix="dn_")
        num_layers = len(scores)
        background = scores.shape[-1]
        scores = scores.flatten(0, 2)
        boxes = boxes.flatten(0, 2)
        is_later = [int(layer >= self.num_single_frame_decoder >= 0) for layer in range(num_layers)]
        of_layers = [queries[later] for later in is_later]
        cls_target, reg_target, is_valid = (torch.cat(parts) for parts in zip(*of_layers, strict=True))
        is_box = cls_target >= 0
        labels = torch.where(is_box, cls_target, background)
        divisors = num_valid[constants_on(num_valid.device, tuple(is_later))]
        return self._by_layer(
            (scores, labels, is_valid.to(scores.dtype)),
            (boxes[:, : reg_target.shape[1]], reg_target),
            divisors,
            "_dn_",
            weight=reg_scale.expand_as(reg_target),
            mask=is_valid & is_box,
        )

    def _by_layer(
        self,
        classes: tuple[Tensor, Tensor, Tensor | None],
        boxes: tuple[Tensor, Tensor],
        divisors: Tensor,
        suffix: str,
        **options: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return the sum of each layer's losses over its divisor, by the name of the loss and of the layer.

        Args:
            classes, boxes: predictions, targets and, for classes, weights [L * n, ...], layer after layer.
            divisors: [L]. options: those of ``loss_reg``.
        """
        prefix = f"{self.task_prefix}_"
        cls, labels, counts = classes
        elements = {
            f"{prefix}loss_cls": self.loss_cls(cls, labels, counts, reduction_override="none"),
            **self.loss_reg(*boxes, prefix=prefix, reduction_override="none", **options),
        }
        losses: dict[str, Tensor] = {}
        for name, of_loss in elements.items():
            sums = of_loss.unflatten(0, (len(divisors), -1)).flatten(1).sum(1) / divisors
            for layer, of_layer in enumerate(sums.unbind()):
                losses[f"{name}{suffix}{layer}"] = of_layer
        return losses


def _stacked(model_outs: dict[str, Any], first: int = 0, prefix: str = "") -> tuple[Tensor, Tensor]:
    """Return classes [L, B, N, C] and predictions [L, B, N, D] of decoder layers from ``first`` on in float32."""
    cls, reg = (model_outs[f"{prefix}{name}"][first:] for name in ("classification", "prediction"))
    return torch.stack(cls).float(), torch.stack(reg).float()
