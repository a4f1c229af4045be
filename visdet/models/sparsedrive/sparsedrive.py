"""The detector SparseDrive, and with other parts Sparse4D."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from visdet.execution.staged_detector import TemporalDetector
from visdet.execution.tensor_tree import ON_HOST
from visdet.ops import feature_maps_format
from visdet.registry import MODELS, built
from visdet.structures import DrivingDataSample

from ..base_detector import BaseDetector
from ..transfer import device_of
from .base_target import Assignment, PairCosts, assigned_instances
from .boxes.box3d_decoder import results_of
from .grid_mask import GridMask
from .sample_batch import DrivingBatch, batch_of
from .temporal.frame_clock import FrameClock
from .temporal.plain_values import from_plain_values, temporal_value, to_plain_values


@temporal_value
@dataclass(frozen=True)
class TemporalState:
    """Everything that a detector remembers of the frames so far. The value is immutable.

    Attributes:
        clock: when and where the last frame was taken, or None if the head keeps nothing from frame to frame.
        head: what the head returned with the last frame.
    """

    clock: FrameClock | None = field(metadata=ON_HOST)
    head: Any


@MODELS.register_module()
class SparseDrive(TemporalDetector, BaseDetector):
    """A detector for frames of several cameras: backbone, neck, head, and in training a branch for dense depth.

    Args:
        img_backbone, img_neck, head, depth_branch: configs of the parts. Neck and depth branch may be None.
        use_grid_mask: whether GridMask augments the training images.
        use_deformable_func: whether the pyramid is flattened once for all layers of the head.
        data_preprocessor: config or module that turns collated frames into a batch.
        channels_last: whether the images go to the backbone with their channels last in memory. Convolutions on CPUs
            and 16-bit convolutions on GPUs are faster so, and flattening the pyramid is, too. Results differ by
            rounding. ``ResNet`` does this by itself in predictions and 16-bit training on a CPU, and on a GPU if its
            normalisations are frozen.
        freeze_perception: whether backbone, neck, detection and map stay as they were loaded, statistics included. They
            then run without gradients and denoising, and only motion and planning learn.
        train_cfg, test_cfg, pretrained: accepted for compatibility. They must be None.

    **Temporal state**: frames of a sequence must come in order, and sample i of a batch must continue sample i of the
    batch before. The state is an argument and a result of ``step``, of the stages, and of the head, its banks and its
    queue, none of which remembers anything. ``visdet.engine.StagedModel`` keeps it from batch to batch, as the trainer
    does. A sample starts anew by itself if its scene changes or its clock jumps, and all samples do if the batch size
    changes or no state is given. Modes 'loss' and 'predict' are given none: no frame follows on another, and no
    instance has a track id.

    Source: arXiv 2405.19620; keywords and parameter names are SparseDrive's.
    """

    input_shape: ClassVar[tuple[str, ...]] = ("B", "V", "3", "H", "W")
    sample_type: ClassVar[type[DrivingDataSample]] = DrivingDataSample
    image_feature_parts: ClassVar[tuple[str, ...]] = ("img_backbone", "img_neck")

    def __init__(
        self,
        img_backbone: dict[str, Any],
        head: dict[str, Any],
        img_neck: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
        train_cfg: None = None,
        test_cfg: None = None,
        pretrained: None = None,
        use_grid_mask: bool = True,
        use_deformable_func: bool = False,
        depth_branch: dict[str, Any] | None = None,
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        channels_last: bool = False,
        freeze_perception: bool = False,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        self.img_backbone = MODELS.build(img_backbone)
        self.img_neck = built(img_neck, MODELS)
        self.head = MODELS.build({**head, "freeze_perception": True} if freeze_perception else head)
        self.depth_branch = built(depth_branch, MODELS)
        self.use_deformable_func = use_deformable_func
        self.channels_last = channels_last
        self.grid_mask = GridMask() if use_grid_mask else None
        self.frozen_parts: list[nn.Module] = []
        if freeze_perception:
            parts = (
                self.img_backbone,
                self.img_neck,
                self.depth_branch,
                self.head.det_head,
                self.head.map_head,
            )
            self.frozen_parts = [part.requires_grad_(False) for part in parts if part is not None]

    def train(self, mode: bool = True) -> "SparseDrive":
        """Set the mode. Frozen parts stay in evaluation."""
        super().train(mode)
        for part in self.frozen_parts:
            part.eval()
        return self

    def plain_state(self, state: TemporalState | None) -> Any:
        """Return a state as plain types, for a checkpoint."""
        return to_plain_values(state)

    def state_of_plain(self, plain: Any) -> TemporalState | None:
        """Return the state that ``plain_state`` was given, on the device of the model."""
        return from_plain_values(_with_one_clock(plain), device_of(self))

    def step(
        self,
        images: Tensor,
        data_samples: Sequence[DrivingDataSample],
        state: TemporalState | None = None,
    ) -> tuple[Any, TemporalState]:
        """Return the head's raw outputs for a frame and the state after it, given the state before.

        Args:
            images: [B, V, 3, H, W]. data_samples: one per frame.
            state: the state that the previous ``step`` returned, or None for a first frame.
        """
        batch = self._entered(images, batch_of(data_samples), state)
        outs, of_head = self.head(self.extract_feat(images), batch.metas, batch.state)
        return outs, TemporalState(batch.clock, of_head)

    def _entered(
        self, images: Tensor, data: dict[str, Any], state: TemporalState | None, **training: Any
    ) -> DrivingBatch:
        """Return the batch of the next frames. The head has entered them, which is all work of the host."""
        head = self.head
        clock = FrameClock.of(data) if head.is_temporal else None
        step = None
        of_head = None
        if clock is not None and state is not None:
            step = clock.since(state.clock)
            of_head = state.head
        of_head = head.enter(of_head, len(images), step)
        return DrivingBatch.of(images, data, of_head, clock=clock, **training)

    def extract_feat(
        self, img: Tensor, return_depth: bool = False, metas: dict[str, Any] | None = None
    ) -> Any:
        """Return the feature pyramid, and with ``return_depth`` the dense depths (None without a depth branch).

        Args:
            img: [B, V, 3, H, W] normalised images. metas: ``focal`` [B, V], for depth.

        Returns:
            [B, V, C, H_l, W_l] of each level, flattened by ``feature_maps_format`` with ``use_deformable_func``.
        """
        B, V = img.shape[:2]
        img = img.flatten(0, 1)
        grid_mask = self.grid_mask
        if grid_mask is not None:
            img = grid_mask(img)
        if self.channels_last:
            img = img.contiguous(memory_format=torch.channels_last)
        maps = self.img_backbone(img)
        neck = self.img_neck
        if neck is not None:
            maps = neck(maps)
        maps = [level.unflatten(0, (B, V)) for level in maps]
        depths = None
        depth_branch = self.depth_branch
        if return_depth and depth_branch is not None:
            depths = depth_branch(maps, (metas or {}).get("focal"))
        features = feature_maps_format(maps) if self.use_deformable_func else maps
        return (features, depths) if return_depth else features

    def raw_outputs(self, inputs: Tensor, data_samples: Sequence[DrivingDataSample] | None) -> Any:
        """Return the head's raw outputs for frames that follow on none. ``step`` takes a state."""
        if data_samples is None:
            raise ValueError(f"{type(self).__name__}: data_samples with the cameras and poses are needed")
        return self.step(inputs, data_samples)[0]

    def training_batch(
        self, inputs: Tensor, data_samples: Sequence[DrivingDataSample], state: TemporalState | None = None
    ) -> DrivingBatch:
        """Return the next frame of each sample's sequence with ground truth and denoising queries. The host works."""
        data = batch_of(data_samples)
        head = self.head
        denoising = head.denoising_queries(data)
        truth = head.ground_truth(data)
        return self._entered(inputs, data, state, denoising=denoising, truth=truth)

    def predictions_and_costs(
        self, batch: DrivingBatch
    ) -> tuple[tuple[Any, Any, dict[str, PairCosts]], tuple[dict[str, PairCosts], Any]]:
        """Return the arguments of ``losses`` and of ``assign``. All work runs on the device.

        Returns:
            (the raw outputs of the head, the depths, the costs of the matching) for the losses, and (these costs, the
            state after the frame) for ``assign``.
        """
        head = self.head
        images = batch.images
        metas = batch.metas
        if self.frozen_parts:
            with torch.no_grad():
                features = self.extract_feat(images)
                depths = None
        else:
            features, depths = self.extract_feat(images, return_depth=True, metas=metas)
        outs, state = head(features, metas, batch.state, batch.denoising)
        costs = head.pair_costs(outs, batch.truth)
        return (outs, depths, costs), (costs, state)

    def assign(
        self, costs_and_state: tuple[dict[str, PairCosts], Any], batch: DrivingBatch
    ) -> dict[str, Assignment]:
        """Return what each prediction has to learn."""
        return assigned_instances(costs_and_state[0], batch.truth)

    def state_after(self, outputs: tuple[Any, Any], batch: DrivingBatch) -> TemporalState:
        """Return the state after a frame, given what ``assign`` is given or what ``detections`` returned."""
        return TemporalState(batch.clock, outputs[1])

    def losses(
        self,
        predictions: tuple[Any, Any, dict[str, PairCosts]],
        batch: DrivingBatch,
        assigned: dict[str, Assignment],
    ) -> dict[str, Tensor]:
        """Return the losses by name. All work runs on the device."""
        outs, depths, costs = predictions
        metas = batch.metas
        losses = self.head.losses(outs, metas, batch.truth, costs, assigned)
        if depths is not None:
            known = metas.get("gt_depth")
            # Without ground truth, a zero keeps the branch in the graph, because in a distributed run every parameter
            # must have a gradient.
            losses["loss_dense_depth"] = (
                sum(depth.sum() for depth in depths) * 0
                if known is None
                else self.depth_branch.loss(depths, known)
            )
        return losses

    def unlinked(self, samples: list[DrivingDataSample]) -> list[DrivingDataSample]:
        """Return the samples without track ids, because nothing links their frames to others."""
        for sample in samples:
            if "instance_ids" in sample.get("pred_instances_3d", ()):
                sample.pred_instances_3d.instance_ids.fill_(-1)
        return samples

    def prediction_batch(
        self, inputs: Tensor, data_samples: Sequence[DrivingDataSample], state: TemporalState | None = None
    ) -> DrivingBatch:
        """Return the next frame of each sample's sequence. The host does this."""
        return self._entered(inputs, batch_of(data_samples, evaluates=True), state)

    def image_features(self, images: Tensor) -> Any:
        """Return the feature pyramid, which ``detections`` takes. It does not depend on anything but the images."""
        return self.extract_feat(images)

    @torch.no_grad()
    def detections(self, batch: DrivingBatch, features: Any = None) -> tuple[dict[str, Any], Any]:
        """Return the results of all frames and the state after them. All work runs on the device.

        Args:
            batch: the frames. features: the result of ``image_features``, which is computed by default.
        """
        features = self.image_features(batch.images) if features is None else features
        head = self.head
        metas = batch.metas
        outs, state = head(features, metas, batch.state)
        return head.select(outs, metas), state

    def with_detections(
        self, detections: tuple[dict[str, Any], Any], data_samples: Sequence[DrivingDataSample]
    ) -> list[DrivingDataSample]:
        """Return the samples with their results filled in."""
        for sample, result in zip(data_samples, results_of(detections[0]), strict=True):
            sample.set_predictions(result)
        return list(data_samples)


@MODELS.register_module()
class Sparse4D(SparseDrive):
    """Sparse4D, which is SparseDrive's detector with a ``Sparse4DHead`` as its head.

    Source: arXiv 2311.11722; keywords and parameter names are Sparse4D's.
    """


def _with_one_clock(plain: Any) -> Any:
    """Return a plain temporal state with its clock on top. In older checkpoints, each bank and queue has one."""
    if plain is None or plain.get("kind") == "TemporalState":
        return plain
    return {"kind": "TemporalState", "clock": _first_clock(plain), "head": plain}


def _first_clock(plain: Any) -> Any:
    """Return the first clock within a plain value, or None if there is none."""
    if not isinstance(plain, dict):
        return None
    if plain.get("kind") == "FrameClock":
        return plain
    return next(filter(None, map(_first_clock, plain.values())), None)
