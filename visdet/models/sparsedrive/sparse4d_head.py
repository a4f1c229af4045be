"""Sparse4D's head: a decoder over instances, for boxes and for polylines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.execution.tensor_tree import map_tensors
from visdet.registry import MODELS, TASK_UTILS, built

from ..layers.precision import as_autocast_input, autocast_dtype
from ..transfer import to_device
from .boxes.box3d_target import DenoisingQueries
from .heads_of_tasks import HeadOfTasks
from .instance_operations import InstanceOperations
from .sample_batch import field_of
from .sparse4d_loss import Sparse4DLoss
from .temporal.frame_clock import FrameStep
from .temporal.instance_bank import InstanceBankState
from .temporal.plain_values import temporal_value


@temporal_value
@dataclass(frozen=True)
class Sparse4DState:
    """What a head keeps from frame to frame.

    Attributes:
        bank: the instances.
        denoising: the denoising queries, the result of the sampler's ``cache_dn``. It is None if there are none.
    """

    bank: InstanceBankState = field(default_factory=InstanceBankState)
    denoising: dict[str, Tensor] | None = None


class _Memory(NamedTuple):
    """The instances of the previous frame [B, K, C], and whether each sample has them.

    All layers attend to the same features, so that the values of the attention are computed only once.
    """

    feature: Tensor
    value: Tensor
    embed: Tensor
    mask: Any  # [B] bool
    history: tuple[bool, ...]


def _rows(layers: Sequence[Any], rows: slice) -> list[Any]:
    """Return rows of what each layer predicts, [B, N + G·n, ...] or None."""
    return [None if of_layer is None else of_layer[:, rows] for of_layer in layers]


@MODELS.register_module()
class Sparse4DHead(InstanceOperations, HeadOfTasks):
    """Detects boxes or polylines by decoder layers that refine instances.

    An instance consists of a feature and an anchor. The layers attend to the images, to the other instances and to the
    instances of the previous frame.

    Args:
        instance_bank: config of the bank that holds the anchors. anchor_encoder: config of their embedding.
        graph_model: config of the attention among the instances.
        temp_graph_model: config of the attention to the instances of the previous frame, or None to leave it out.
        norm_layer, ffn, deformable_model, refine_layer: configs of the other operations.
        num_decoder: number of decoder layers in the default ``operation_order``.
        num_single_frame_decoder: number of decoder layers before the instances of the previous frame join. With -1 they
            never do.
        loss_cls, loss_reg: configs of the losses. sampler: config of the targets. decoder: config of what turns
            predictions into results.
        gt_cls_key, gt_reg_key: the keys of labels and boxes in the data. gt_id_key: that of the ids in ``img_metas``.
        with_instance_id: whether the instances get track ids.
        task_prefix: the prefix of the losses' names.
        reg_weights: the weight of each regressed number. Its length is the number of regressed numbers.
        cls_threshold_to_reg: instances learn to regress if their probability is above this. With 0 or less all do.
        operation_order: names of operations, of 'temp_gnn', 'gnn', 'norm', 'ffn', 'deformable' and 'refine'.
        decouple_attn: whether feature and embedding are concatenated for the attention instead of being added.
        dn_loss_weight: accepted for compatibility. Neither the published code nor this class uses it.

    The temporal state is an argument and a result of ``forward``. A sample whose history was dropped is treated as in a
    first frame, whatever the other samples of its batch have.

    Source: Sparse4D v3, arXiv 2311.11722; SparseDrive, arXiv 2405.19620; names and defaults are theirs.
    """

    def __init__(
        self,
        instance_bank: dict[str, Any],
        anchor_encoder: dict[str, Any],
        graph_model: dict[str, Any],
        norm_layer: dict[str, Any],
        ffn: dict[str, Any],
        deformable_model: dict[str, Any],
        refine_layer: dict[str, Any],
        num_decoder: int = 6,
        num_single_frame_decoder: int = -1,
        temp_graph_model: dict[str, Any] | None = None,
        loss_cls: dict[str, Any] | None = None,
        loss_reg: dict[str, Any] | None = None,
        decoder: dict[str, Any] | None = None,
        sampler: dict[str, Any] | None = None,
        gt_cls_key: str = "gt_labels_3d",
        gt_reg_key: str = "gt_bboxes_3d",
        gt_id_key: str = "instance_id",
        with_instance_id: bool = True,
        task_prefix: str = "det",
        reg_weights: Sequence[float] | None = None,
        operation_order: Sequence[Literal["temp_gnn", "gnn", "norm", "ffn", "deformable", "refine"]]
        | None = None,
        cls_threshold_to_reg: float = -1,
        dn_loss_weight: float = 5.0,
        decouple_attn: bool = True,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        layer_ops = ["temp_gnn", "gnn", "norm", "deformable", "norm", "ffn", "norm", "refine"]
        order = (layer_ops * num_decoder)[3:] if operation_order is None else operation_order
        self.num_single_frame_decoder = num_single_frame_decoder
        self.gt_cls_key = gt_cls_key
        self.gt_reg_key = gt_reg_key
        self.gt_id_key = gt_id_key
        self.with_instance_id = with_instance_id
        self.task_prefix = task_prefix

        self.instance_bank = MODELS.build(instance_bank)
        self.anchor_encoder = MODELS.build(anchor_encoder)
        self.sampler = built(sampler, TASK_UTILS)
        self.decoder = built(decoder, TASK_UTILS)
        configs = {
            "temp_gnn": temp_graph_model,
            "gnn": graph_model,
            "norm": norm_layer,
            "ffn": ffn,
            "deformable": deformable_model,
            "refine": refine_layer,
        }
        self.build_operations(configs, order, self.instance_bank.embed_dims, decouple_attn)
        self.criterion = self._criterion(loss_cls, loss_reg, reg_weights, cls_threshold_to_reg)

    def _criterion(
        self,
        loss_cls: dict[str, Any] | None,
        loss_reg: dict[str, Any] | None,
        reg_weights: Sequence[float] | None,
        cls_threshold_to_reg: float,
    ) -> Sparse4DLoss:
        """Return the criterion, given what the constructor was given."""
        layers: Any = self.layers
        return Sparse4DLoss(
            sampler=self.sampler,
            loss_cls=built(loss_cls, MODELS),
            loss_reg=built(loss_reg, MODELS),
            reg_weights=(1.0,) * 10 if reg_weights is None else tuple(reg_weights),
            cls_threshold_to_reg=cls_threshold_to_reg,
            num_single_frame_decoder=self.num_single_frame_decoder,
            task_prefix=self.task_prefix,
            gt_cls_key=self.gt_cls_key,
            gt_reg_key=self.gt_reg_key,
            num_classes=min((layer.num_cls for layer in layers if hasattr(layer, "num_cls")), default=None),
        )

    def init_weights(self) -> None:
        """Initialise the operations, the bank and the encoder."""
        self.init_operations(self.instance_bank, self.anchor_encoder)

    @property
    def is_temporal(self) -> bool:
        """Whether instances are kept from frame to frame, for which the times and poses of frames are needed."""
        return self.instance_bank.num_temp_instances > 0

    def enter(self, state: Sparse4DState | None, batch_size: int, step: FrameStep | None) -> Sparse4DState:
        """Return the state with which a frame starts. This is all work on the host that ``forward`` needs.

        Args:
            state: what the frame before left, or None in a first frame. batch_size: B.
            step: what lies between the two frames, or None if the frame has no predecessor.
        """
        state = state or Sparse4DState()
        bank = self.instance_bank.enter(state.bank, batch_size, step)
        return Sparse4DState(bank, None if bank.step is None else state.denoising)

    @property
    def _denoises(self) -> bool:
        """Whether the head learns from denoising queries."""
        sampler = self.sampler
        return self.training and sampler is not None and sampler.num_dn_groups > 0

    def denoising_queries(self, metas: dict[str, Any]) -> DenoisingQueries | None:
        """Return noisy copies of the ground truth in ``metas``, or None in evaluation or without denoising groups.

        The host makes them, so that it need not wait for the device.
        """
        if not self._denoises:
            return None
        ids = None
        samples = metas["img_metas"]
        key = self.gt_id_key
        if all(key in sample for sample in samples):
            ids = [torch.as_tensor(sample[key]).cpu() for sample in samples]
        labels = [row.cpu() for row in field_of(metas, self.gt_cls_key)]
        boxes = [row.cpu() for row in metas[self.gt_reg_key]]
        device = self.instance_bank.anchor.device
        queries = self.sampler.get_dn_anchors(labels, boxes, ids, pads=device.type != "cpu")
        return map_tensors(partial(to_device, device=device), queries)

    def forward(
        self,
        feature_maps: Sequence[Any],
        metas: dict[str, Any],
        state: Sparse4DState | None = None,
        denoising: DenoisingQueries | None = None,
    ) -> tuple[dict[str, Any], Sparse4DState]:
        """Return the predictions of all decoder layers, and the state for the next frame.

        Args:
            feature_maps: the result of ``feature_maps_format``, or [B, V, C, H, W] of each level.
            metas: ``projection_mat`` and ``image_wh``.
            state: the result of ``enter``. With None, the frame is a first one.
            denoising: the result of ``denoising_queries``. The layers refine these queries beside the instances.

        Returns:
            The predictions and the state. Lists with an element for each layer: ``classification`` [B, N, classes],
            ``prediction`` [B, N, D], and ``quality`` [B, N, 2] or None. Tensors of the last layer:
            ``instance_feature`` and ``anchor_embed`` [B, N, C], and ``instance_id`` [B, N]. The keys ``dn_*`` hold
            what the losses of denoising need: classes and predictions of each layer, and the classes, boxes and marks
            of what counts of the queries, before and after those of the previous frame have joined.
        """
        batch_size = feature_maps[0].shape[0]
        bank = self.instance_bank
        state = state or self.enter(None, batch_size, None)
        feature, anchor, time_interval, bank_state = bank.get(state.bank, batch_size)
        memory = self._memory(bank_state, feature)
        attn_mask = None
        joined: Any = denoising
        if denoising is not None:
            feature, anchor, attn_mask = self._join(feature, anchor, denoising)
        embed = self.anchor_encoder(anchor)
        embed_of_attention = as_autocast_input(embed)
        predicted: list[tuple[Tensor, Tensor, Tensor | None]] = []
        num_single_frame = self.num_single_frame_decoder
        for op, layer in self.steps():
            if op == "temp_gnn":
                feature = self._attend_to_memory(layer, feature, embed_of_attention, memory, attn_mask)
            elif op == "gnn":
                feature = as_autocast_input(feature)
                value = self.fc_before(feature)
                feature = self.attend(layer, feature, embed_of_attention, value=value, attn_mask=attn_mask)
            elif op in ("norm", "ffn"):
                feature = layer(feature)
            elif op == "deformable":
                feature = layer(feature, anchor, embed, feature_maps, metas)
            else:
                anchor, cls, qt = layer(feature, anchor, embed, time_interval=time_interval)
                predicted.append((cls, anchor, qt))
                num_predicted = len(predicted)
                if num_predicted == num_single_frame < self.operation_order.count("refine"):
                    feature, anchor, bank_state = bank.update(bank_state, feature, anchor, cls)
                    feature, anchor, joined = self._update_denoising(feature, anchor, denoising, state)
                embed = self.anchor_encoder(anchor)
                embed_of_attention = as_autocast_input(embed)
                if num_predicted > num_single_frame and memory is not None:
                    memory = memory._replace(embed=embed_of_attention[:, : bank.num_temp_instances])

        N = bank.num_anchor
        of_frame = () if denoising is None else (denoising, joined)
        output = self._outputs(predicted, of_frame)
        found = feature[:, :N]
        classes = cls[:, :N]
        output["instance_feature"] = found
        output["anchor_embed"] = embed[:, :N]
        queries = None
        if of_frame:
            queries = self.sampler.cache_dn(feature[:, N:], anchor[:, N:], joined)
        bank_state = bank.cache(bank_state, found, anchor[:, :N], classes)
        if self.with_instance_id:
            threshold = getattr(self.decoder, "score_threshold", None)
            output["instance_id"], bank_state = bank.get_instance_id(bank_state, classes, threshold)
        return output, Sparse4DState(bank_state, queries)

    def _outputs(
        self,
        layers: Sequence[tuple[Tensor, Tensor, Tensor | None]],
        queries: Sequence[DenoisingQueries],
    ) -> dict[str, Any]:
        """Return what all layers predict for the instances and, if there are some, for the denoising queries.

        Args:
            layers: classes [B, N + G·n, C], anchors [B, N + G·n, D] and quality of each layer.
            queries: those before and after the queries of the previous frame have joined.
        """
        N = self.instance_bank.num_anchor
        instances = slice(N)
        classes, anchors, quality = zip(*layers, strict=True)
        output: dict[str, Any] = {
            "classification": _rows(classes, instances),
            "prediction": _rows(anchors, instances),
            "quality": _rows(quality, instances),
        }
        if queries:
            behind = slice(N, None)
            output["dn_classification"] = _rows(classes, behind)
            output["dn_prediction"] = _rows(anchors, behind)
            output["dn_targets"] = [(one.cls_target, one.reg_target, one.valid_mask) for one in queries]
        return output

    def _memory(self, state: InstanceBankState, feature: Tensor) -> _Memory | None:
        """Return what the layers attend to of the previous frame, or None if no sample has one."""
        cached: Any = state.cached_feature
        history = state.history
        if "temp_gnn" not in self.operation_order or not any(history):
            return None
        # The previous frame may have been computed with another type of autocast.
        past = cached.to(autocast_dtype(feature))
        embed = as_autocast_input(self.anchor_encoder(state.cached_anchor))
        return _Memory(past, self.fc_before(past), embed, state.mask, history)

    def _attend_to_memory(
        self,
        layer: nn.Module,
        feature: Tensor,
        embed: Tensor,
        memory: _Memory | None,
        attn_mask: Tensor | None,
    ) -> Tensor:
        """Return the instances after attention to the instances of the previous frame.

        In samples without a previous frame they attend to one another.
        """
        if memory is None:
            return self.attend(layer, feature, embed, attn_mask=attn_mask)
        past, past_value, past_embed, mask, history = memory
        if all(history):
            return self.attend(layer, feature, embed, past, past_embed, past_value)
        # Keys of both kinds stand side by side, and each sample attends to those of one kind.
        K = past.shape[1]
        keys = torch.cat([past, feature], 1)
        embeds = torch.cat([past_embed, embed], 1)
        own_value = torch.cat([feature, embed], -1) if self.decouple_attn else feature
        value = torch.cat([past_value, own_value.to(past_value.dtype)], 1)
        is_past = torch.arange(keys.shape[1], device=keys.device) < K
        hidden = is_past ^ mask[:, None]
        if attn_mask is not None:
            attn_mask = F.pad(attn_mask, (K, 0))
        return self.attend(
            layer, feature, embed, keys, embeds, value, attn_mask=attn_mask, key_padding_mask=hidden
        )

    @staticmethod
    def _join(feature: Tensor, anchor: Tensor, denoising: DenoisingQueries) -> tuple[Tensor, Tensor, Tensor]:
        """Return features and anchors followed by the denoising queries, and the mask that separates the two."""
        N = anchor.shape[1]
        noisy = denoising.anchor
        _, count, dims = noisy.shape
        # The vertical velocity becomes 0.
        anchor = torch.cat([anchor, F.pad(noisy, (0, anchor.shape[-1] - dims))], dim=1)
        attn_mask = F.pad(denoising.attn_mask, (N, 0, N, 0), value=True)
        attn_mask[:N, :N] = False
        return F.pad(feature, (0, 0, 0, count)), anchor, attn_mask

    def _update_denoising(
        self,
        feature: Tensor,
        anchor: Tensor,
        denoising: DenoisingQueries | None,
        state: Sparse4DState,
    ) -> tuple[Tensor, Tensor, DenoisingQueries | None]:
        """Return features, anchors and queries after the groups of the previous frame have replaced the first groups.

        Without groups of the previous frame, they are unchanged.
        """
        kept = state.denoising
        bank = self.instance_bank
        bank_state = state.bank
        step: Any = bank_state.step
        if denoising is None or denoising.id_target is None or kept is None:
            return feature, anchor, denoising
        past = kept["dn_anchor"]
        moved = bank.moved(past.flatten(1, 2), step).view_as(past)
        return self.sampler.update_dn(
            feature, anchor, denoising, bank.num_anchor, bank_state.mask, {**kept, "dn_anchor": moved}
        )

    def criteria(self) -> dict[str, Sparse4DLoss]:
        """Return the criterion of the only task."""
        return {self.task_prefix: self.criterion}

    def outputs_by_task(self, model_outs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the outputs of the only task, in training with denoising queries.

        If this process has none, they are empty, because another process may have some.
        """
        if self._denoises and "dn_targets" not in model_outs:
            none = slice(0)
            predicted = _rows(model_outs["prediction"], none)
            boxes = predicted[-1].detach()
            label = boxes[..., 0].long()
            model_outs = model_outs | {
                "dn_classification": _rows(model_outs["classification"], none),
                "dn_prediction": predicted,
                "dn_targets": [(label, boxes, label.bool())] * 2,
            }
        return {self.task_prefix: model_outs}

    def select(self, model_outs: dict[str, Any], data: dict[str, Any]) -> dict[str, Tensor]:
        """Return the results of the batch on its device. All work runs on the device."""
        return self.decoder.select(
            model_outs["classification"],
            model_outs["prediction"],
            model_outs.get("instance_id"),
            model_outs["quality"],
        )
