"""The losses of Sparse4D's head."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visdet.errors import InvalidInputError

from ..layers.precision import without_autocast
from ..transfer import constants_on
from .base_target import Assignment, InstanceTargets, PaddedInstances, PairCosts
from .sample_batch import field_of


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
        given = field_of(data, key)
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
            cls, reg = self._stacked(model_outs, first=0 if self.learns else -1)
            pairs = self.sampler.pair_costs(cls.detach(), reg.detach(), truth)
            valid = [is_valid.sum().float() for _, _, is_valid in model_outs.get("dn_targets", ())]
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
            cls, reg = self._stacked(model_outs)
            num_layers = len(cls)
            num_positive = assigned.num_positive
            targets = self.sampler.targets_of(assigned.index, truth, pairs.ordering, cls.shape[-1])
            # Constants go to the device once, and without waiting for it.
            reg_scale = constants_on(reg.device, self.reg_weights, reg.dtype)
            losses = self._losses_of_layers(
                cls, reg, model_outs["quality"], targets, num_positive[:num_layers], reg_scale
            )
            if "dn_targets" in model_outs:
                losses |= self._denoising_losses(model_outs, num_positive[num_layers:], reg_scale)
            return losses

    def _stacked(self, model_outs: dict[str, Any], first: int = 0, prefix: str = "") -> tuple[Tensor, Tensor]:
        """Return the float32 classes [L, B, N, C] and regressed numbers [L, B, N, D] of layers from ``first`` on."""
        cls, reg = (model_outs[f"{prefix}{name}"][first:] for name in ("classification", "prediction"))
        return torch.stack(cls).float(), torch.stack(reg)[..., : len(self.reg_weights)].float()

    def _losses_of_layers(
        self,
        cls: Tensor,
        reg: Tensor,
        quality: list[Any],
        targets: InstanceTargets,
        num_positive: Tensor,
        reg_scale: Tensor,
    ) -> dict[str, Tensor]:
        """Return the losses of L layers by name. num_positive [L] divides their sums.

        The quality is that of each layer, [B, N, 2] or None.
        """
        background = cls.shape[-1]
        cls_target = targets.labels
        is_matched = cls_target < background
        learns = is_matched
        threshold = self.cls_threshold_to_reg
        if threshold > 0:
            learns = learns & (cls.detach().amax(-1).sigmoid() > threshold)
        return self._by_layer(
            (cls, torch.where(is_matched, cls_target, background), None),
            (reg, targets.values[..., : reg.shape[-1]].nan_to_num(nan=0.0)),
            num_positive,
            "_",
            weight=targets.weights * reg_scale,
            quality=None if quality[0] is None else torch.stack(quality).float(),
            cls_target=cls_target,
            mask=learns,
        )

    def _denoising_losses(
        self, model_outs: dict[str, Any], num_valid: Tensor, reg_scale: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses of the denoising queries of all layers by name.

        num_valid [2] divides their sums, in the layers before and after the queries of the previous frame have joined.
        """
        scores, boxes = self._stacked(model_outs, prefix="dn_")
        first_joined = self.num_single_frame_decoder
        is_later = tuple(int(layer >= first_joined >= 0) for layer in range(len(scores)))
        of_layers = constants_on(num_valid.device, is_later)
        cls_target, reg_target, is_valid = (
            torch.stack(both)[of_layers] for both in zip(*model_outs["dn_targets"], strict=True)
        )
        reg_target = reg_target[..., : boxes.shape[-1]]
        is_box = cls_target >= 0
        return self._by_layer(
            (scores, torch.where(is_box, cls_target, scores.shape[-1]), is_valid.to(scores.dtype)),
            (boxes, reg_target),
            num_valid[of_layers],
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
            classes, boxes: predictions, targets and, for classes, weights [L, B, N, ...].
            divisors: [L]. options: those of ``loss_reg``, [L, B, N, ...].
        """
        prefix = f"{self.task_prefix}_"
        flat_options = dict(zip(options, _flat(options.values()), strict=True))
        elements = {
            f"{prefix}loss_cls": self.loss_cls(*_flat(classes), reduction_override="none"),
            **self.loss_reg(*_flat(boxes), prefix=prefix, reduction_override="none", **flat_options),
        }
        losses: dict[str, Tensor] = {}
        for name, of_loss in elements.items():
            sums = of_loss.unflatten(0, (len(divisors), -1)).flatten(1).sum(1) / divisors
            for layer, of_layer in enumerate(sums.unbind()):
                losses[f"{name}{suffix}{layer}"] = of_layer
        return losses


def _flat(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return tensors [L, B, N, ...] as [L * B * N, ...]."""
    return [None if tensor is None else tensor.flatten(0, 2) for tensor in tensors]
