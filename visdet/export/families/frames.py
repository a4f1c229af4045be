"""Detectors for frames of several cameras: Sparse4D and SparseDrive.

The state is named inputs and outputs. Every frame runs the same graph: the first one gets zeros as its state and False
in ``same_scene``, and so does a sample whose scene changes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import Dim

from visdet.execution.tensor_tree import map_tensors, tensors_of
from visdet.models.sparsedrive.deformable_feature_aggregation import DeformableFeatureAggregation
from visdet.models.sparsedrive.sample_batch import DrivingBatch, batch_of
from visdet.models.sparsedrive.sparse4d_head import Sparse4DState
from visdet.models.sparsedrive.temporal.frame_clock import DeviceStep, FrameClock, FrameStep, counted_step

from ..errors import ExportError
from .family import Family, Tensors, seeded

_INPUTS = ("images", "projection_mat", "image_wh")
_STEP = ("previous_to_current", "seconds", "same_scene")
_COMMAND = "gt_ego_fut_cmd"


def _named(tree: Any, name: str) -> Tensors:
    """Return the tensors of a tree by their dotted names, in the order of ``tensors_of``."""
    match tree:
        case Tensor():
            return {name: tree}
        case list() | tuple():
            parts: dict[Any, Any] = dict(enumerate(tree))
        case dict():
            parts = tree
        case _:
            parts = vars(tree) if is_dataclass(tree) else {}
    found: Tensors = {}
    for part, value in parts.items():
        found |= _named(value, f"{name}.{part}")
    return found


def _kept(state: Any) -> Any:
    """Return a state without what is only known within a frame."""
    if isinstance(state, dict):
        return {name: _kept(part) for name, part in state.items()}
    if isinstance(state, Sparse4DState):
        return Sparse4DState(replace(state.bank, temp_confidence=None, mask=None, history=(), step=None))
    return state


def _filled(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a tree with other tensors, in the order of ``tensors_of``."""
    remaining = iter(tensors)

    def following(_: Tensor) -> Tensor:
        return next(remaining)

    return map_tensors(following, tree)


@dataclass(frozen=True)
class _StepInGraph:
    """What lies between two frames, as a graph knows it. It takes the place of a ``FrameStep``."""

    previous_to_current: Tensor
    seconds: Tensor
    same_scene: Tensor

    def entered(
        self, max_time_interval: float, default_interval: float, device: torch.device, dtype: torch.dtype
    ) -> tuple[DeviceStep, tuple[bool, ...]]:
        """Return the step, and a history as if some samples had one and others had not: only the graph knows it."""
        is_continued, interval, velocity = counted_step(
            torch.where,
            self.seconds,
            self.previous_to_current,
            self.same_scene,
            max_time_interval,
            default_interval,
        )
        step = DeviceStep(self.previous_to_current, self.seconds, interval, is_continued, velocity)
        return step, (True, False)


class Frames(Family):
    """The inputs are ``images`` [B, V, 3, H, W], ``projection_mat``, ``image_wh``, the command of a planner, what lies
    between the previous frame and this one, and the state. The outputs are the results by task, and the next state.
    """

    shape: tuple[int, int]
    about: ClassVar[dict[str, str]] = {
        "images": "float32 [B, V, 3, H, W]: normalised, one image for each camera",
        "projection_mat": "float32 [B, V, 4, 4]: from the lidar frame to the pixels of each image",
        "image_wh": "float32 [B, V, 2]: (width, height) of the images in pixels",
        _COMMAND: "float32 [B, 3]: the command (right, left, straight), one-hot",
        "previous_to_current": "float32 [B, 4, 4]: from the lidar frame of the previous frame to that of this one, "
        "computed in float64; the unit matrix in a first frame",
        "seconds": "float32 [B]: the time since the previous frame, computed in float64; 0 in a first frame",
        "same_scene": "bool [B]: whether the previous frame is of the same scene; False in a first frame",
    }

    def __init__(self, model: Any, shape: tuple[int, int] | None, batch: int | None) -> None:
        super().__init__(model, shape, batch)
        if shape is None:
            raise ExportError(
                f"{type(model).__name__} needs the size of its images: give shape, or --shape H W"
            )
        self.cameras = next(
            part.num_cams for part in model.modules() if isinstance(part, DeformableFeatureAggregation)
        )
        motion = getattr(model.head, "motion_plan_head", None)
        self.is_temporal = model.head.is_temporal
        self.template, outputs = self._example_of_state(
            1 if motion is None else motion.instance_queue.queue_length
        )
        self.examples = _named(self.template, "state") if self.is_temporal else {}
        self.states = {name: f"next_{name}" for name in self.examples}
        step = _STEP if self.is_temporal else ()
        self.input_names = (*_INPUTS, *(() if motion is None else (_COMMAND,)), *step, *self.examples)
        self.selected = outputs
        results = _named(outputs, "results")
        self.output_names = (*results, *self.states.values())
        layouts = {n: (n.rpartition(".")[0], *value.shape[1:2]) for n, value in results.items()}
        self.rows = {
            score: tuple(name for name, layout in layouts.items() if layout == layouts[score])
            for score in results
            if score.endswith((".scores_3d", ".scores", ".trajs_score"))
        }
        self.clock: FrameClock | None = None  # of the frame that ``inputs_of`` has seen last
        self.state: Tensors = {}

    @torch.no_grad()
    def _example_of_state(self, num_frames: int) -> tuple[Any, Any]:
        """Return the state after so many frames and one more, and the results of the last one."""
        given = self._frame(2, seeded())
        images = given["images"]
        model = self.model
        step = FrameStep((0.5,) * 2, torch.eye(4, dtype=torch.float64).repeat(2, 1, 1), (True,) * 2)
        state = None
        for _ in range(num_frames + 1):
            entered = model.head.enter(state, 2, step)
            results, state = model.detections(DrivingBatch.of(images, given, entered))
        maps = model.image_features(images)
        # In the graph, the sizes of the levels are numbers, which cannot be read from a tensor there.
        self.tables = [table.numpy(force=True) for table in maps[1:]] if model.use_deformable_func else None
        return _kept(state), results

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.input_names, tensors, strict=True))
        images = given["images"]
        model = self.model
        before = None
        step = None
        if self.is_temporal:
            before = _filled(self.template, [given[name] for name in self.states])
            step = _StepInGraph(*(given[name] for name in _STEP))
        state = model.head.enter(before, tensors[0].shape[0], step)
        features = model.image_features(images)
        if self.tables is not None:
            features = [features[0], *self.tables]
        results, after = model.detections(DrivingBatch.of(images, given, state), features)
        return (*tensors_of(results), *(tensors_of(_kept(after)) if self.is_temporal else ()))

    def dynamic(self) -> dict[str, dict[int, Dim]]:
        return {name: axes for name, axes in super().dynamic().items() if not name.endswith(".prev_id")}

    def empty_state(self, batch: int) -> Tensors:
        """Return the state before a first frame."""
        return {
            name: value.new_zeros((batch, *value.shape[1:]) if value.dim() else ())
            for name, value in self.examples.items()
        }

    def _frame(self, batch: int, generator: torch.Generator) -> Tensors:
        """Return the cameras of a frame, which form a ring, with random images."""
        height, width = self.shape
        cameras = self.cameras
        yaw = torch.arange(cameras) * (2 * math.pi / cameras)
        focal = width / 1.4
        pixels = torch.tensor(
            [[focal, 0, width / 2, 0], [0, focal, height / 2, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
        )
        views = torch.zeros(cameras, 4, 4)  # from the lidar frame to (right, down, forward)
        views[:, 0, 0] = views[:, 2, 1] = yaw.cos()
        views[:, 2, 0] = yaw.sin()
        views[:, 0, 1] = -views[:, 2, 0]
        views[:, 1, 2] = -1
        views[:, 3, 3] = 1
        matrices = pixels @ views  # [V, 4, 4]
        frame = {
            "images": torch.randn(batch, cameras, 3, height, width, generator=generator),
            "projection_mat": matrices.expand(batch, -1, -1, -1).contiguous(),
            "image_wh": torch.tensor([width, height]).float().expand(batch, cameras, 2).contiguous(),
            _COMMAND: torch.eye(3)[torch.arange(batch) % 3],
        }
        return {name: value.to(self.device) for name, value in frame.items()}

    def cases(self) -> Iterator[list[Tensors]]:
        """Yield drives with irregular times, in which a frame is dropped and one sample comes into a new scene."""
        device = self.device
        generator = seeded(1)
        for batch in (self.batch or 2, self.batch or 1):
            calls = []
            for index, seconds in enumerate((0.0, 0.5, 0.1, 2.5, 0.7)):
                matrix = torch.eye(4).repeat(batch, 1, 1)
                matrix[:, 1, 3] = -4.0 * seconds  # The vehicle drives forward.
                given = self._frame(batch, generator) | {
                    "previous_to_current": matrix.to(device),
                    "seconds": torch.full((batch,), seconds, device=device),
                    "same_scene": torch.tensor(
                        [index not in (0, 2 + n) for n in range(batch)], device=device
                    ),
                }
                given |= self.empty_state(batch) if index == 0 else {}
                calls.append({name: given[name] for name in self.input_names if name in given})
            yield calls if self.is_temporal else calls[:1]

    def inputs_of(self, inputs: Tensor, data_samples: Sequence[Any]) -> Tensors:
        """Return the inputs for the next frame of each sequence, with the state of the frame before."""
        size = tuple(inputs.shape[-2:])
        if size != self.shape:
            raise ExportError(f"images of {size} are outside the exported range: {self.shape}")
        data = batch_of(data_samples, evaluates=True)
        given = {"images": inputs, **{n: v.float() for n, v in data.items() if isinstance(v, Tensor)}}
        batch = len(inputs)
        if self.is_temporal:
            clock = FrameClock.of(data)
            step = clock.since(self.clock)
            self.clock = clock
            if step is None:
                self.state = self.empty_state(batch)
                step = FrameStep((0.0,) * batch, torch.eye(4).repeat(batch, 1, 1), (False,) * batch)
            given |= {
                "previous_to_current": step.previous_to_current.float(),
                "seconds": torch.tensor(step.seconds, dtype=torch.float32),
                "same_scene": torch.tensor(step.same_scene),
                **self.state,
            }
        return {name: given[name].to(self.device) for name in self.input_names}

    def samples_of(self, outputs: Tensors, data_samples: Sequence[Any]) -> list[Any]:
        self.state = self.state_after(outputs)
        results = _filled(self.selected, [outputs[name] for name in self.output_names])
        return self.model.with_detections((results, None), data_samples)
