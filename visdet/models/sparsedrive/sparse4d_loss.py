"""The losses of Sparse4D's head."""

from typing import Any

import torch
from torch import Tensor

from ..transfer import constants_on
from .base_target import Assignment, InstanceTargets, PairCosts
from .padded_instances import PaddedInstances

__all__ = ["Sparse4DLoss"]


class Sparse4DLoss:
    """The losses of ``Sparse4DHead``: those of matched instances and those of denoising queries.

    ``pair_costs`` and ``losses`` run on the device of one process alone. Between them, ``assigned_instances`` solves
    the assignments and averages the counts over the processes. Every process takes part in that, whatever its ground
    truth, so that no process waits for another one in vain.
    """

    # These attributes belong to the head.
    training: bool
    sampler: Any
    loss_cls: Any
    loss_reg: Any
    reg_weights: list[float]
    cls_threshold_to_reg: float
    num_single_frame_decoder: int
    gt_cls_key: str
    gt_reg_key: str
    task_prefix: str

    def get_targets(
        self, model_outs: dict[str, Any], data: dict[str, Any], only_last: bool = False
    ) -> InstanceTargets:
        """Return what the predictions of all decoder layers, or of the last one alone, have to learn.

        Args:
            model_outs: the result of ``forward``.
            data: the ground truth under ``gt_cls_key`` and ``gt_reg_key``, one tensor per sample.
            only_last: whether only the last layer is wanted.
        """
        with torch.autocast(model_outs["prediction"][0].device.type, enabled=False):
            cls, reg = _stacked(model_outs, slice(-1, None) if only_last else slice(None))
            reg = reg[..., : len(self.reg_weights)]
            return self.sampler.sample_layers(
                cls.detach(), reg.detach(), data[self.gt_cls_key], data[self.gt_reg_key]
            )

    def ground_truth(self, data: dict[str, Any], device: torch.device) -> PaddedInstances:
        """Return what ``data`` holds under ``gt_cls_key`` and ``gt_reg_key``, one tensor per sample, on ``device``."""
        return self.sampler.ground_truth(data[self.gt_cls_key], data[self.gt_reg_key], device)

    def pair_costs(
        self, model_outs: dict[str, Any], truth: PaddedInstances, only_last: bool = False
    ) -> PairCosts:
        """Return what it costs to assign ``truth`` to the predictions of all decoder layers, or of the last one."""
        with torch.autocast(truth.labels.device.type, enabled=False):
            cls, reg = _stacked(model_outs, slice(-1, None) if only_last else slice(None))
            pairs = self.sampler.pair_costs(cls.detach(), reg[..., : len(self.reg_weights)].detach(), truth)
            valid = [is_valid.sum().float() for _, _, is_valid in self._denoising_targets(model_outs, cls)]
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
        device_type = model_outs["prediction"][0].device.type
        with torch.autocast(device_type, enabled=False):
            cls, reg = _stacked(model_outs)
            reg = reg[..., : len(self.reg_weights)]
            cls_target, reg_target, reg_weight, _ = self.sampler.targets_of(
                assigned.index, truth, pairs.ordering, cls.shape[-1]
            )
            # Constants go to the device once, and without waiting for it.
            reg_scale = constants_on(reg.device, tuple(self.reg_weights), reg.dtype)
            reg_weight = reg_weight * reg_scale
            is_matched = cls_target < cls.shape[-1]
            num_positive = assigned.num_positive
            losses: dict[str, Tensor] = {}
            for layer, qt in enumerate(model_outs["quality"]):
                losses |= self._layer_loss(
                    layer,
                    cls[layer],
                    reg[layer],
                    None if qt is None else qt.float(),
                    (cls_target[layer], reg_target[layer], reg_weight[layer], is_matched[layer]),
                    num_positive[layer],
                )
            queries = self._denoising_targets(model_outs, cls)
            if queries:
                losses |= self._denoising_loss(model_outs, cls, queries, num_positive[len(cls) :], reg_scale)
            return losses

    def _layer_loss(
        self,
        layer: int,
        cls: Tensor,
        reg: Tensor,
        quality: Tensor | None,
        targets: tuple[Tensor, Tensor, Tensor, Tensor],
        num_positive: Tensor,
    ) -> dict[str, Tensor]:
        cls, reg = cls.flatten(0, 1), reg.flatten(0, 1)
        quality = None if quality is None else quality.flatten(0, 1)
        cls_target, reg_target, reg_weight, is_matched = (x.flatten(0, 1) for x in targets)
        background = cls.shape[-1]
        cls_loss = self.loss_cls(
            cls, torch.where(is_matched, cls_target, background), avg_factor=num_positive
        )
        learns = is_matched
        if self.cls_threshold_to_reg > 0:
            learns = learns & (cls.detach().amax(-1).sigmoid() > self.cls_threshold_to_reg)
        reg_losses = self.loss_reg(
            reg,
            reg_target[..., : reg.shape[-1]].nan_to_num(nan=0.0),
            weight=reg_weight,
            avg_factor=num_positive,
            prefix=f"{self.task_prefix}_",
            suffix=f"_{layer}",
            quality=quality,
            cls_target=cls_target,
            mask=learns,
        )
        return {f"{self.task_prefix}_loss_cls_{layer}": cls_loss, **reg_losses}

    def _denoising_targets(
        self, model_outs: dict[str, Any], cls: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (class, box, valid) of the queries, [n], [n, D] and [n].

        The list has two elements, for the layers before and after the queries of the previous frame have joined. If
        this process has no queries, their tensors are empty, because another process may have some. Without denoising
        the list is empty.
        """
        if not (self.training and self.sampler.num_dn_groups > 0) and "dn_prediction" not in model_outs:
            return []
        D = len(self.reg_weights)
        if "dn_prediction" not in model_outs:
            empty = torch.zeros(0, dtype=torch.int64, device=cls.device)
            return [(empty, cls.new_zeros(0, D), empty.bool())] * 2
        later = "temp_" if "temp_dn_valid_mask" in model_outs else ""
        return [
            (
                model_outs[f"{prefix}dn_cls_target"].flatten(0, 1),
                model_outs[f"{prefix}dn_reg_target"].flatten(0, 1)[:, :D],
                model_outs[f"{prefix}dn_valid_mask"].flatten(0, 1),
            )
            for prefix in ("", later)
        ]

    def _denoising_loss(
        self,
        model_outs: dict[str, Any],
        cls: Tensor,
        queries: list[tuple[Tensor, Tensor, Tensor]],
        num_valid: Tensor,
        reg_scale: Tensor,
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        num_layers, _, _, background = cls.shape
        for layer in range(num_layers):
            is_later = int(layer >= self.num_single_frame_decoder >= 0)
            cls_target, reg_target, is_valid = queries[is_later]
            if "dn_prediction" in model_outs:
                scores = model_outs["dn_classification"][layer].float().flatten(0, 1)
                boxes = model_outs["dn_prediction"][layer].float().flatten(0, 1)
            else:
                scores = cls[layer].flatten(0, 1)[:0]
                boxes = model_outs["prediction"][layer].float().flatten(0, 1)[:0]
            is_box = is_valid & (cls_target >= 0)
            name = f"{self.task_prefix}_loss_cls_dn_{layer}"
            losses[name] = self.loss_cls(
                scores,
                torch.where(cls_target >= 0, cls_target, background),
                weight=is_valid.to(scores.dtype),
                avg_factor=num_valid[is_later],
            )
            losses |= self.loss_reg(
                boxes[:, : reg_target.shape[1]],
                reg_target,
                weight=reg_scale.expand_as(reg_target),
                avg_factor=num_valid[is_later],
                prefix=f"{self.task_prefix}_",
                suffix=f"_dn_{layer}",
                mask=is_box,
            )
        return losses


def _stacked(model_outs: dict[str, Any], layers: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return classes [L, B, N, C] and predictions [L, B, N, D] of decoder layers in float32."""
    cls, reg = (model_outs[name][layers] for name in ("classification", "prediction"))
    return torch.stack([x.float() for x in cls]), torch.stack([x.float() for x in reg])
