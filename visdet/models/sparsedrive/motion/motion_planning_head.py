"""The head that predicts the motion of agents and plans the motion of the ego vehicle."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS, TASK_UTILS
from visdet.structures.rotated_boxes import turned

from ...layers.positional_encoding import box_embedding
from ...layers.precision import in_full_precision
from ..anchor_files import ModuleWithAnchors
from ..boxes.box3d import VX, VY, yaw_of
from ..instance_operations import InstanceOperations
from ..mlp import perceptron
from ..sample_batch import probabilities_of
from ..temporal.frame_clock import DeviceStep
from ..temporal.instance_bank import topk
from ..temporal.instance_queue import InstanceQueueState
from .motion_planning_loss import MotionPlanningLoss


def gen_sineembed_for_position(pos_tensor: Tensor, hidden_dim: int = 256) -> Tensor:
    """Return the sines and cosines [..., hidden_dim] of positions [..., 2]. Those of y come first.

    Source: the name and the formula are SparseDrive's.
    """
    return box_embedding(pos_tensor.float().flip(-1), hidden_dim // 2)


def _most_confident(output: dict[str, Any], probability: Tensor, count: int) -> list[Tensor]:
    """Return the features and the embeddings [B, at most count, C] of the instances of the greatest probabilities.

    Args:
        output: the raw outputs of a head. probability: [B, N, classes]. count: the greatest number of instances.
    """
    feature = output["instance_feature"]
    embed = output["anchor_embed"]
    _, rows = topk(probability.amax(-1), min(count, feature.shape[1]), feature, embed)
    return rows


def _raw_outputs(
    cls: list[Tensor], steps: list[Tensor], period: Tensor, anchors: Sequence[Tensor]
) -> dict[str, Any]:
    """Return what is predicted for instances in each refinement, and what is remembered of them."""
    return {"classification": cls, "prediction": steps, "period": period, "anchor_queue": list(anchors)}


_NUSCENES_CLASSES = 10


@MODELS.register_module()
class MotionPlanningHead(InstanceOperations, ModuleWithAnchors):
    """Predicts several modes of motion for every instance, and of a plan for the ego, which is an additional instance.

    The queue's temporal state is an argument and a result of ``forward``.

    Args:
        fut_ts, fut_mode: number of steps and of modes of agents.
        ego_fut_ts, ego_fut_mode: number of steps of the ego, and of its modes for each command.
        motion_anchor: [classes, fut_mode, fut_ts, 2], trajectories in the coordinates of an agent, or a .npy file.
        plan_anchor: [3, ego_fut_mode, ego_fut_ts, 2], or a .npy file. While a file is missing, its anchors are zeros,
            which a checkpoint replaces. Training with such anchors is an error.
        embed_dims: width C of the features.
        decouple_attn: whether feature and embedding are concatenated for the attention instead of being added.
        instance_queue: config of the queue of the last frames.
        operation_order: names of operations, of 'temp_gnn', 'gnn', 'norm', 'cross_gnn', 'ffn' and 'refine'.
        temp_graph_model: config of the attention of an instance to its own past.
        graph_model, cross_graph_model: configs of the attention to the most confident instances and map elements.
        norm_layer, ffn, refine_layer: configs of the other operations.
        motion_sampler, planning_sampler: configs of the targets.
        motion_loss_cls, motion_loss_reg, plan_loss_cls, plan_loss_reg, plan_loss_status: configs of the losses.
        motion_decoder, planning_decoder: configs of what turns predictions into results.
        num_det, num_map: number of the most confident instances and map elements, to which instances attend.
        plan_step_s: the time in seconds between the steps of a plan. The steps are then predicted as differences from
            those at the velocity of the ego's anchor. With None they are predicted as they are.
        num_classes: number of classes of ``motion_anchor``. With None it is as many as there are, or 10 while the file
            is missing.

    Source: arXiv 2405.19620; names and defaults are SparseDrive's. One thing differs: the sine embedding has
    ``embed_dims`` channels.
    """

    class_rows: ClassVar[dict[str, list[str]]] = {"classes": ["motion_anchor"]}

    def __init__(
        self,
        fut_ts: int = 12,
        fut_mode: int = 6,
        ego_fut_ts: int = 6,
        ego_fut_mode: int = 3,
        motion_anchor: Any = None,
        plan_anchor: Any = None,
        embed_dims: int = 256,
        decouple_attn: bool = False,
        instance_queue: dict[str, Any] | None = None,
        operation_order: Sequence[Literal["temp_gnn", "gnn", "norm", "cross_gnn", "ffn", "refine"]] = (),
        temp_graph_model: dict[str, Any] | None = None,
        graph_model: dict[str, Any] | None = None,
        cross_graph_model: dict[str, Any] | None = None,
        norm_layer: dict[str, Any] | None = None,
        ffn: dict[str, Any] | None = None,
        refine_layer: dict[str, Any] | None = None,
        motion_sampler: dict[str, Any] | None = None,
        motion_loss_cls: dict[str, Any] | None = None,
        motion_loss_reg: dict[str, Any] | None = None,
        planning_sampler: dict[str, Any] | None = None,
        plan_loss_cls: dict[str, Any] | None = None,
        plan_loss_reg: dict[str, Any] | None = None,
        plan_loss_status: dict[str, Any] | None = None,
        motion_decoder: dict[str, Any] | None = None,
        planning_decoder: dict[str, Any] | None = None,
        num_det: int = 50,
        num_map: int = 10,
        plan_step_s: float | None = None,
        num_classes: int | None = None,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.fut_ts = fut_ts
        self.fut_mode = fut_mode
        self.ego_fut_ts = ego_fut_ts
        self.ego_fut_mode = ego_fut_mode
        self.num_det = num_det
        self.num_map = num_map
        self.plan_step_s = plan_step_s
        self.instance_queue = MODELS.build(instance_queue)
        self.motion_decoder = TASK_UTILS.build(motion_decoder)
        self.planning_decoder = TASK_UTILS.build(planning_decoder)
        motion_learns = (motion_sampler, motion_loss_cls, motion_loss_reg)
        planning_learns = (planning_sampler, plan_loss_cls, plan_loss_reg, plan_loss_status)
        self.criterion = MotionPlanningLoss(motion_learns, planning_learns)
        configs = {
            "temp_gnn": temp_graph_model,
            "gnn": graph_model,
            "cross_gnn": cross_graph_model,
            "norm": norm_layer,
            "ffn": ffn,
            "refine": refine_layer,
        }
        self.build_operations(configs, operation_order, embed_dims, decouple_attn)
        self.motion_anchor = self._anchors("motion_anchor", motion_anchor, (num_classes, fut_mode, fut_ts, 2))
        self.plan_anchor = self._anchors("plan_anchor", plan_anchor, (3, ego_fut_mode, ego_fut_ts, 2))
        self.motion_anchor_encoder = perceptron(embed_dims, embed_dims, out_loops=1)
        self.plan_anchor_encoder = perceptron(embed_dims, embed_dims, out_loops=1)

    def _anchors(self, name: str, given: Any, shape: tuple[Any, ...]) -> nn.Parameter:
        """Return anchors of a shape, from numbers or a .npy file. They do not learn.

        If the first size of the shape is None, any size is accepted.
        """
        first, *rest = shape
        anchors = self.read_anchors(name, given, (first or _NUSCENES_CLASSES, *rest))
        count, *sizes = anchors.shape
        if sizes != rest or first not in (None, count):
            wanted = [first or "classes", *rest]
            raise InvalidInputError(f"MotionPlanningHead: {name} must be {wanted}, got {[count, *sizes]}")
        return nn.Parameter(anchors.clone(), requires_grad=False)

    def init_weights(self) -> None:
        """Initialise the operations."""
        self.init_operations()

    def forward(
        self,
        det_output: dict[str, Any],
        map_output: dict[str, Any],
        feature_maps: Sequence[Any],
        state: InstanceQueueState | None,
        anchor_encoder: nn.Module,
        step: DeviceStep | None,
        anchor_handler: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], InstanceQueueState]:
        """Return the raw outputs of motion and of planning, and the state for the next frame.

        Args:
            det_output, map_output: raw outputs of the other heads. feature_maps: as in ``Sparse4DHead``.
            state: what the frame before left, or None in a first frame.
            anchor_encoder: embeds the boxes of instances and of the ego.
            step: what lies between the two frames. Without one, the queue starts anew.
            anchor_handler: module with ``anchor_projection``, which moves boxes in space and time.

        Returns:
            two dicts and the state. ``classification`` [B, N, M] and ``prediction`` [B, N, M, T, 2] (steps in metres)
            are lists with one tensor for each refinement. ``period`` is [B, N], and ``anchor_queue`` is a list of the
            boxes [B, N, D] of the last frames. For planning, N is 1, there are 3 * M modes, and ``status`` [B, 1, 10]
            is another list.
        """
        self.require_anchors()
        if "instance_id" not in det_output:
            raise InvalidInputError(
                "MotionPlanningHead: detection must give ids: set its head's with_instance_id"
            )
        feature = det_output["instance_feature"]
        embed = det_output["anchor_embed"]
        N = feature.shape[1]
        probability = probabilities_of(det_output)
        map_probability = probabilities_of(map_output)
        best, best_embed = _most_confident(det_output, probability, self.num_det)
        map_feature, map_embed = _most_confident(map_output, map_probability, self.num_map)
        queue = self.instance_queue
        ego_feature, ego_anchor, past, past_anchor, is_absent, state = queue.get(
            state, det_output, feature_maps, step, anchor_handler
        )
        ego_feature = ego_feature.to(feature.dtype)
        ego_embed = self._embed_of_ego(anchor_encoder(ego_anchor), state)
        past = past.flatten(0, 1).to(feature.dtype)
        past_embed = anchor_encoder(past_anchor).flatten(0, 1)
        memory = past, past_embed, self.fc_before(past), is_absent.flatten(0, 1)
        modes = self._mode_queries(probability, det_output["prediction"][-1])
        feature = torch.cat([feature, ego_feature], 1)
        embed = torch.cat([embed, ego_embed], 1)
        best = torch.cat([best, ego_feature], 1)
        best_embed = torch.cat([best_embed, ego_embed], 1)
        best_value = self.fc_before(best)
        outputs = []
        for op, layer in self.steps():
            if op == "temp_gnn":
                feature = self._attend_to_past(layer, feature, embed, memory)
            elif op == "gnn":
                feature = self.attend(layer, feature, embed, best, best_embed, best_value)
            elif op == "cross_gnn":
                feature = layer(feature, key=map_feature, query_pos=embed, key_pos=map_embed)
            elif op == "refine":
                outputs.append(self._refined(layer, feature, embed, *modes))
            else:
                feature = layer(feature)
        motion_cls, motion_reg, plan_cls, plan_reg, status = map(list, zip(*outputs, strict=True))
        seconds = self.plan_step_s
        if seconds is not None:
            constant = seconds * ego_anchor[:, :, None, None, VX : VY + 1]
            plan_reg = [steps + constant for steps in plan_reg]
        state = queue.cache(state, det_output, feature[:, N:], status[-1])
        motion = _raw_outputs(motion_cls, motion_reg, state.period, state.anchors)
        planning = _raw_outputs(plan_cls, plan_reg, state.ego_period, state.ego_anchors)
        planning["status"] = status
        return motion, planning, state

    def _embed_of_ego(self, embed: Tensor, state: InstanceQueueState) -> Tensor:
        """Return the embedding [B, 1, C] of the ego's anchor, with that of its motion if the queue knows it."""
        motion = self.instance_queue.ego_motion_embed(state)
        return embed if motion is None else embed + motion

    @staticmethod
    def _refined(
        layer: nn.Module, feature: Tensor, embed: Tensor, motion_modes: Tensor, plan_modes: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the result of a ``MotionPlanningRefinementModule`` for instances, the last of which is the ego."""
        N = motion_modes.shape[1]
        query = (feature + embed).unsqueeze(2)
        motion_query = motion_modes + query[:, :N]
        return layer(motion_query, plan_modes + query[:, N:], feature[:, N:], embed[:, N:])

    def _attend_to_past(
        self, layer: nn.Module, feature: Tensor, embed: Tensor, memory: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the instances [B, N, C] after each has attended to its own past.

        Args:
            memory: features, embeddings and values [B * N, frames, C] of the last frames of each instance, and a mask
                [B * N, frames] that is True where it was not there.
        """
        past, past_embed, past_value, is_absent = memory
        of_each = feature.flatten(0, 1).unsqueeze(1)
        embed_of_each = embed.flatten(0, 1).unsqueeze(1)
        attended = self.attend(
            layer, of_each, embed_of_each, past, past_embed, past_value, key_padding_mask=is_absent
        )
        return attended.reshape(feature.shape)

    def _mode_queries(self, probability: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of the modes of motion [B, N, M, C] and of planning [1, 1, 3 * M, C].

        They embed the end points of the anchors. For motion, these are the anchors of the best class, which are rotated
        by the yaw of the box.
        """
        modes = self.motion_anchor[probability.argmax(-1)][..., -1, :]  # [B, N, M, 2]
        anchors = anchors.detach().float()
        yaw = yaw_of(anchors)[..., None, None]
        ends = turned(modes, yaw)
        C = self.embed_dims
        motion = in_full_precision(self.motion_anchor_encoder, gen_sineembed_for_position(ends, C))
        plan = gen_sineembed_for_position(self.plan_anchor[..., -1, :], C).flatten(0, 1)
        return motion, in_full_precision(self.plan_anchor_encoder, plan)[None, None]

    def select(
        self,
        det_output: dict[str, Any],
        motion_output: dict[str, Any],
        planning_output: dict[str, Any],
        data: dict[str, Any],
    ) -> dict[str, dict[str, Tensor]]:
        """Return the results of motion and planning of the batch; see the decoders. All work runs on its device."""
        motion = self.motion_decoder.select(
            det_output["classification"],
            det_output["prediction"],
            det_output["instance_id"],
            det_output["quality"],
            motion_output,
        )
        planning = self.planning_decoder.select(det_output, motion_output, planning_output, data)
        return {"motion": motion, "planning": planning}
