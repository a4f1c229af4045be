"""The depth of one view from a second one: a model that is built on FusedSampleAttention, its data set and its metric.

``visdet train examples/two_view_depth/config.py`` trains it; docs/sample_attention.md says how well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.structures import BaseDataElement
from scipy.ndimage import map_coordinates
from scipy.spatial.transform import Rotation
from torch import Tensor, nn

from visdet.models.base_detector import BaseDetector
from visdet.models.layers import ConvModule
from visdet.registry import DATASETS, METRICS, MODELS

_TEXTURE_CELLS = 64
_CELL_PER_DEPTH = (
    0.07  # the size of a texture cell divided by its depth, so that every cell is a few pixels wide
)


class TwoViewDataSample(BaseDataElement):
    """What is known about a pair of views.

    Attributes:
        intrinsics: [3, 3], the camera matrix of both views, in pixels, whose centres are at + 0.5.
        source_from_reference: [4, 4], the relative pose, in the unit of the depths.
        gt_depth, pred_depth: [H / 2, W / 2], the z coordinates in the reference view.
    """


def epipolar_samples(
    intrinsics: Tensor,  # [B, 3, 3]
    source_from_reference: Tensor,  # [B, 4, 4]
    depths: Tensor,  # [D]
    image_size: tuple[int, int],
    grid_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # [B, Q, D, 2], Bool[B, Q, D]
    """Project points on the rays of a grid over the reference view, at the given depths, into the source view.

    Args:
        intrinsics, source_from_reference: those of the samples.
        depths: z coordinates in the reference view.
        image_size: (height, width) in pixels.
        grid_size: the (h, w) of the grid. The centres of its Q = h · w cells are the queries, row by row.

    Returns:
        The positions (x, y) in the source image, which reaches from -1 to 1 from edge to edge, and a mask that is True
        where a point lies behind the source camera. The position of such a point is meaningless.
    """
    (height, width), (rows, columns) = image_size, grid_size
    y = (torch.arange(rows, device=depths.device) + 0.5) * (height / rows)
    x = (torch.arange(columns, device=depths.device) + 0.5) * (width / columns)
    pixels = F.pad(torch.cartesian_prod(y, x).flip(1), (0, 1), value=1.0)  # [Q, 3] (x, y, 1)
    turn = intrinsics @ source_from_reference[:, :3, :3] @ torch.linalg.inv(intrinsics)
    shift = (intrinsics @ source_from_reference[:, :3, 3:]).squeeze(-1)
    seen = (pixels @ turn.mT).unsqueeze(2) * depths.view(-1, 1) + shift.view(-1, 1, 1, 3)  # [B, Q, D, 3]
    behind = seen[..., 2] <= 0
    place = seen[..., :2] / seen[..., 2:].masked_fill(behind.unsqueeze(-1), 1.0)
    return place * place.new_tensor([2 / width, 2 / height]) - 1, behind


@MODELS.register_module()
class TwoViewDepth(BaseDetector):
    """Predicts the depth of the reference view from a second, posed view.

    A few convolutions compute features of both views at half the resolution. Every feature of the reference view
    attends to the features of the source view at ``num_depths`` candidates along its epipolar line, which are evenly
    spaced in inverse depth. The prediction is the mean candidate under the attention weights plus a correction by
    another few convolutions.

    Args:
        attention: config of the attention, such as a 'FusedSampleAttention'.
        embed_dims: channels of the features.
        num_blocks: number of residual convolutions of the features.
        num_depths: number D of candidates.
        depth_range: the depths of the nearest and the farthest candidate.
        loss_depth_weight: weight of the L1 loss of the inverse depth, which is scaled so that its range is 0..1. The
            cross entropy between the attention weights and the true candidates has the weight 1.
    """

    input_shape = (
        "B",
        "2",
        "3",
        "H",
        "W",
    )  # the reference view and the source view, in 0..255, of even H and W
    sample_type = TwoViewDataSample

    def __init__(
        self,
        attention: dict[str, Any],
        embed_dims: int = 32,
        num_blocks: int = 3,
        num_depths: int = 32,
        depth_range: tuple[float, float] = (1.2, 8.0),
        loss_depth_weight: float = 10.0,
    ) -> None:
        super().__init__({"type": "DrivingDataPreprocessor"})
        norm = {"type": "GN", "num_groups": 4}
        self.num_depths = num_depths
        self.nearest, self.farthest = (1 / depth for depth in depth_range)  # inverse depths
        self.loss_depth_weight = loss_depth_weight
        self.stem = ConvModule(3, embed_dims, 5, stride=2, padding=2, norm_cfg=norm)
        self.blocks = nn.ModuleList(
            ConvModule(embed_dims, embed_dims, 3, padding=1, norm_cfg=norm) for _ in range(num_blocks)
        )
        self.features = nn.Conv2d(embed_dims, embed_dims, 1)
        self.attention = MODELS.build({"embed_dims": embed_dims, **attention})
        self.correction = nn.Sequential(
            ConvModule(embed_dims + 1, embed_dims, 3, padding=1, norm_cfg=norm),
            ConvModule(embed_dims, embed_dims, 3, padding=1, norm_cfg=norm),
            nn.Conv2d(embed_dims, 1, 3, padding=1),
        )
        for parameter in self.correction[-1].parameters():
            nn.init.zeros_(parameter)

    def raw_outputs(self, inputs: Tensor, data_samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the inverse depths [B, H / 2, W / 2], from 0 (farthest) to 1, and the attention weights [B, Q, D]."""
        x = self.stem(inputs.flatten(0, 1).float() / 127.5 - 1)
        for block in self.blocks:
            x = x + block(x)
        reference, source = self.features(x).unflatten(0, (-1, 2)).unbind(1)  # [B, C, h, w]
        candidates = torch.linspace(0, 1, self.num_depths, device=inputs.device)  # [D], in the range
        samples, behind = epipolar_samples(
            torch.stack([sample.intrinsics for sample in data_samples]),
            torch.stack([sample.source_from_reference for sample in data_samples]),
            1 / self._inverse_depth(candidates),
            inputs.shape[-2:],
            reference.shape[-2:],
        )
        found, weights = self.attention(
            reference.flatten(2).mT,
            source.contiguous(),
            samples,
            0.5 * candidates.expand(samples.shape[:-1]),  # half a period, so that the two ends differ
            behind,
        )
        weights = weights.mean(dim=1)  # [B, Q, D]
        position = (weights @ candidates.to(weights.dtype)).view(-1, 1, *reference.shape[-2:])
        context = torch.cat((found.mT.unflatten(2, reference.shape[-2:]), position.to(found.dtype)), dim=1)
        return (position + self.correction(context).float()).squeeze(1), weights

    def loss(self, inputs: Tensor, data_samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return ``loss_match`` and ``loss_depth``."""
        position, weights = self.raw_outputs(inputs, data_samples)
        gt_depth = torch.stack([sample.gt_depth for sample in data_samples])
        truth = ((1 / gt_depth - self.farthest) / (self.nearest - self.farthest)).clamp(0, 1)
        # The true weights interpolate the truth between the two nearest candidates.
        place = truth.flatten(1) * (self.num_depths - 1)  # [B, Q]
        steps = torch.arange(self.num_depths, device=place.device)
        target = (1 - (place.unsqueeze(-1) - steps).abs()).clamp(min=0)
        return {
            "loss_match": -(target * (weights + 1e-6).log()).sum(-1).mean(),
            "loss_depth": self.loss_depth_weight * F.l1_loss(position, truth),
        }

    def predict(self, inputs: Tensor, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples with ``pred_depth`` [H / 2, W / 2]."""
        position, _ = self.raw_outputs(inputs, data_samples)
        depths = 1 / self._inverse_depth(position.clamp(0, 1))
        for sample, depth in zip(data_samples, depths, strict=True):
            sample.set_field(depth, "pred_depth")
        return list(data_samples)

    def _inverse_depth(self, position: Tensor) -> Tensor:
        return self.farthest + (self.nearest - self.farthest) * position


@dataclass
class _Plane:
    centre: np.ndarray  # [3], in the frame of the reference camera
    axes: np.ndarray  # [3, 3], whose rows are two directions within the plane and its normal
    radius: float  # that of the disc, half the side of the square, or inf for the whole plane
    is_disc: bool  # whether it is a disc or a square
    texture: np.ndarray  # [cells, cells, 3] in 0..1, repeated over the plane


@DATASETS.register_module()
class TwoViewPairs(BaseDataset):
    """Pairs of views of a slanted wall behind discs and squares, with the depth of the reference view.

    Pair i is drawn, when it is read, from ``numpy.random.default_rng([seed, i])``. The inputs are the two views, uint8
    [2, 3, H, W], in RGB.

    Args:
        num_pairs: number of pairs in the data set.
        image_size: (height, width), even numbers.
        depth_range: the nearest depth of a shape's centre and the farthest depth of the wall's centre.
        noise: standard deviation of the noise of each view, on the scale 0..255.
        depth_stride: the side, in pixels, of the squares at whose centres the depth is given.
        seed: seed of the random numbers. Data sets with different seeds share no pair.
    """

    unit = "pairs"

    def __init__(
        self,
        num_pairs: int,
        image_size: tuple[int, int] = (48, 64),
        depth_range: tuple[float, float] = (1.5, 6.0),
        noise: float = 3.0,
        depth_stride: int = 2,
        seed: int = 0,
        **base_arguments: Any,
    ) -> None:
        self.num_pairs, self.image_size, self.depth_range = num_pairs, image_size, depth_range
        self.noise, self.depth_stride, self.seed = noise, depth_stride, seed
        super().__init__(ann_file="", **base_arguments)

    def load_data_list(self) -> list[dict]:
        """Return one entry per pair. The pictures are drawn later."""
        return [{"pair": pair} for pair in range(self.num_pairs)]

    def prepare_data(self, idx: int) -> dict:
        """Return pair ``idx``, which is drawn now."""
        rng = np.random.default_rng([self.seed, idx])
        height, width = self.image_size
        intrinsics = np.array([[0.9 * width, 0, width / 2], [0, 0.9 * width, height / 2], [0, 0, 1]])
        planes = self._scene(rng)
        source = _pose(rng)
        rays = _pixel_rays(intrinsics, height, width, 1)
        views = []
        for pose in (np.eye(4), source):
            colours, _ = _render(planes, pose, rays)
            colours = 255 * colours + rng.normal(0.0, self.noise, colours.shape)
            views.append(colours.round().clip(0, 255).astype(np.uint8).transpose(2, 0, 1))
        _, depth = _render(planes, np.eye(4), _pixel_rays(intrinsics, height, width, self.depth_stride))
        sample = TwoViewDataSample(
            intrinsics=torch.from_numpy(intrinsics).float(),
            source_from_reference=torch.from_numpy(source).float(),
            gt_depth=torch.from_numpy(depth).float(),
        )
        return {"inputs": torch.from_numpy(np.stack(views)), "data_samples": sample}

    def _scene(self, rng: np.random.Generator) -> list[_Plane]:
        nearest, farthest = self.depth_range
        wall_depth = rng.uniform(0.6, 1.0) * farthest
        planes = [_plane(rng, np.array([0.0, 0.0, wall_depth]), np.inf, 0.35)]
        for _ in range(rng.integers(2, 5)):
            depth = 1 / rng.uniform(1 / (0.8 * wall_depth), 1 / nearest)
            place = rng.uniform(-0.45, 0.45, 2) * depth
            planes.append(_plane(rng, np.array([*place, depth]), rng.uniform(0.12, 0.25) * depth, 0.3))
        return planes


def _plane(rng: np.random.Generator, centre: np.ndarray, radius: float, max_slope: float) -> _Plane:
    normal = np.array([*rng.uniform(-max_slope, max_slope, 2), 1.0])
    normal /= np.linalg.norm(normal)
    angle = rng.uniform(0, 2 * np.pi)
    across = np.cross(normal, [-np.sin(angle), np.cos(angle), 0.0])
    across /= np.linalg.norm(across)
    axes = np.stack((across, np.cross(normal, across), normal))
    # The texture consists of shades of a random colour, which tells nothing about the depth.
    texture = rng.uniform(0.2, 0.8, 3) + rng.uniform(-0.35, 0.35, (_TEXTURE_CELLS, _TEXTURE_CELLS, 3))
    return _Plane(centre, axes, radius, bool(rng.integers(2)), texture.clip(0, 1))


def _pose(rng: np.random.Generator) -> np.ndarray:
    """Return source_from_reference [4, 4], a small rotation and a translation parallel to the image plane."""
    angle, distance = rng.uniform(0, 2 * np.pi), rng.uniform(0.3, 0.6)
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_euler("XYZ", rng.uniform(-0.04, 0.04, 3)).as_matrix()
    pose[:3, 3] = distance * np.cos(angle), distance * np.sin(angle), 0.0
    return pose


def _pixel_rays(intrinsics: np.ndarray, height: int, width: int, stride: int) -> np.ndarray:
    """Return rays [H / stride, W / stride, 3] with z = 1 through the centres of squares of ``stride`` pixels."""
    x, y = np.meshgrid(np.arange(stride / 2, width, stride), np.arange(stride / 2, height, stride))
    return np.stack((x, y, np.ones_like(x)), axis=-1) @ np.linalg.inv(intrinsics).T


def _render(planes: list[_Plane], pose: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the colours [H, W, 3] in 0..1 and the depth [H, W] that a camera at ``pose`` sees along its rays."""
    rotation, eye = pose[:3, :3], -pose[:3, :3].T @ pose[:3, 3]
    directions = rays @ rotation  # in the frame of the reference camera
    colours = np.zeros(rays.shape)
    depth = np.full(rays.shape[:2], np.inf)
    for plane in planes:
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = ((plane.centre - eye) @ plane.axes[2]) / (directions @ plane.axes[2])
        hit = (distance > 0) & (distance < depth)
        points = eye + distance[hit, None] * directions[hit]
        place = (points - plane.centre) @ plane.axes[:2].T  # [hits, 2]
        size = np.hypot(*place.T) if plane.is_disc else np.abs(place).max(axis=-1, initial=0.0)
        inside = size < plane.radius
        hit[hit] = inside
        depth[hit] = distance[hit]
        cells = place[inside].T / (_CELL_PER_DEPTH * plane.centre[2])
        for channel in range(3):
            shades = map_coordinates(plane.texture[..., channel], cells, order=1, mode="grid-wrap")
            colours[hit, channel] = shades
    return colours, depth


@METRICS.register_module()
class TwoViewDepthMetric(BaseMetric):
    """Errors of depth maps, and of the best constant depth, over all pixels of all pairs.

    * ``abs_rel`` is the mean of abs(predicted - true) / true.
    * ``inverse_error`` is the mean of abs(1 / predicted - 1 / true). ``inverse_error_constant`` is the same for the
      constant depth that minimises it, whose inverse is the median of the true inverse depths.
    * ``within_10_percent`` is the fraction of pixels with abs(predicted - true) < 0.1 true, and
      ``within_10_percent_constant`` is the same for that constant depth.
    """

    default_prefix = "two_view"
    metric_names = ("abs_rel", "inverse_error*", "within_10_percent*")

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Keep the predicted and the true depths of a batch."""
        for sample in data_samples:
            self.results.append(
                torch.stack((sample["pred_depth"], sample["gt_depth"])).double().cpu().numpy()
            )

    def compute_metrics(self, results: list[np.ndarray]) -> dict[str, float]:
        """Return the metrics of all pairs."""
        predicted, truth = np.concatenate([depths.reshape(2, -1) for depths in results], axis=1)
        metrics = {"abs_rel": float(np.mean(np.abs(predicted - truth) / truth))}
        for suffix, depth in (("", predicted), ("_constant", 1 / np.median(1 / truth))):
            metrics[f"inverse_error{suffix}"] = float(np.mean(np.abs(1 / depth - 1 / truth)))
            metrics[f"within_10_percent{suffix}"] = float(np.mean(np.abs(depth - truth) < 0.1 * truth))
        return metrics
