"""A volume as a sum of learnable 3-D Gaussians: a model on ``visdet.ops.gaussian_field``, its data set and its metric.

``PYTHONPATH=examples/gaussian_field visdet train examples/gaussian_field/config.py`` trains it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.data import Dataset

from visdet.checks.array_files import load_array
from visdet.checks.finite import check_finite
from visdet.export.families import FAMILIES
from visdet.export.families.family import Family, Tensors
from visdet.models.base_detector import BaseDetector
from visdet.ops import gaussian_field
from visdet.registry import DATASETS, HOOKS, METRICS, MODELS

_LOG_SCALES = (0, 2, 5)  # columns of cov_tril that hold the logarithms of the factor's diagonal


class FieldDataSample(BaseDataElement):
    """True and predicted values of a field at points.

    Attributes:
        gt_field, pred_field: [n], the values at the n points.
    """


@MODELS.register_module()
class PointsDataPreprocessor(BaseDataPreprocessor):
    """Joins the points of a batch, and moves points and samples to the device."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return ``dict(inputs=points [M, 3], data_samples=[FieldDataSample of each chunk])``."""
        data = self.cast_data(data)
        return {"inputs": torch.cat(data["inputs"]), "data_samples": data["data_samples"]}


@MODELS.register_module()
class LearnableGaussianField(BaseDetector):
    """``field(x) = sum_n weights[n] * exp(-|L_n^-1 (x - means[n])|^2 / 2)``, with lower Cholesky factors L_n.

    The parameters are ``means`` [N, 3], ``cov_tril`` [N, 6] = (log l00, l10, log l11, l20, l21, log l22), and
    ``weights`` [N]. In a new field, the means are uniform in a cube that begins at 0, the standard deviations are
    volume_size / N^(1/3), and the weights are 1.

    Args:
        num_gaussians: N.
        volume_size: the side of the cube.
        tolerance: that of :func:`visdet.ops.gaussian_field`.
    """

    input_shape = ("M", "3")
    sample_type = FieldDataSample

    def __init__(self, num_gaussians: int, volume_size: float = 10.0, tolerance: float = 0.0) -> None:
        super().__init__(PointsDataPreprocessor())
        self.tolerance = tolerance
        self.means = nn.Parameter(torch.rand(num_gaussians, 3) * volume_size)
        cov_tril = torch.zeros(num_gaussians, 6)
        cov_tril[:, _LOG_SCALES] = np.log(volume_size / num_gaussians ** (1 / 3))
        self.cov_tril = nn.Parameter(cov_tril)
        self.weights = nn.Parameter(torch.ones(num_gaussians))

    @property
    def cholesky(self) -> Tensor:
        """The lower factors [N, 3, 3] of the covariances."""
        log_l00, l10, log_l11, l20, l21, log_l22 = self.cov_tril.unbind(1)
        zero = torch.zeros_like(l10)
        rows = (log_l00.exp(), zero, zero, l10, log_l11.exp(), zero, l20, l21, log_l22.exp())
        return torch.stack(rows, 1).view(-1, 3, 3)

    def raw_outputs(self, inputs: Tensor, data_samples: Sequence[Any] | None = None) -> Tensor:
        """Return the field [M] at points [M, 3]. The samples have no effect."""
        return gaussian_field(inputs, self.means, self.cholesky, self.weights, self.tolerance)

    def loss(self, inputs: Tensor, data_samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return ``loss_mse``, the mean squared error over the points of all samples."""
        truth = torch.cat([sample.gt_field for sample in data_samples])
        return {"loss_mse": nn.functional.mse_loss(self.raw_outputs(inputs), truth)}

    def predict(self, inputs: Tensor, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples with ``pred_field``."""
        return with_predictions(self.raw_outputs(inputs), data_samples)

    @torch.no_grad()
    def initialize(self, points: Tensor, values: Tensor, seed: int) -> None:
        """Place the Gaussians at points [M, 3] that are drawn in proportion to the magnitude of their values [M].

        The standard deviations become half the mean distance of evenly spread Gaussians. Each weight is the value at
        the drawn point divided by the unweighted field there, so that overlapping Gaussians do not add up to too much.
        """
        count = len(self.means)
        chosen = values.abs().multinomial(count, generator=torch.Generator().manual_seed(seed))
        extent = points.amax(0) - points.amin(0)
        spacing = (extent.prod() / count) ** (1 / 3)
        self.means.copy_(points[chosen])
        self.cov_tril[:, _LOG_SCALES] = (0.5 * spacing).log().to(self.cov_tril)
        self.weights.fill_(1.0)
        self.weights.copy_(values[chosen].to(self.weights) / self.raw_outputs(self.means))


def with_predictions(field: Tensor, data_samples: Sequence[Any]) -> list[Any]:
    """Return the samples, each with its part of the field as ``pred_field``."""
    parts = field.split([len(sample.gt_field) for sample in data_samples])
    for sample, values in zip(data_samples, parts, strict=True):
        sample.set_field(values, "pred_field")
    return list(data_samples)


class Field(Family):
    """The exported field: the input is ``points`` [M, 3], and the output is ``field`` [M]."""

    input_names = ("points",)
    output_names = ("field",)
    about = {
        "points": "float32 [M, 3]: positions in the units of the volume",
        "field": "[M]: the sum of the Gaussians",
    }

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the field."""
        return (self.model.raw_outputs(*tensors),)

    def dynamic(self) -> dict[str, dict[int, Dim]]:
        """Return the axis of the points, with the numbers of them that are possible."""
        return {} if self.batch else {"points": {0: Dim("batch", min=1, max=16_777_216)}}

    def cases(self) -> Iterator[list[Tensors]]:
        """Yield points around the means."""
        means = self.model.means
        generator = torch.Generator().manual_seed(0)
        for count in (257, 1, 1000):
            noise = torch.randn(self.batch or count, 3, generator=generator).to(means)
            yield [{"points": means.mean(0) + noise * means.std(0)}]

    def inputs_of(self, inputs: Tensor, data_samples: Sequence[Any]) -> Tensors:
        """Return the points."""
        return {"points": inputs}

    def samples_of(self, outputs: Tensors, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples with ``pred_field``."""
        return with_predictions(outputs["field"], data_samples)


FAMILIES[LearnableGaussianField] = Field


@DATASETS.register_module()
class VolumeDataset(Dataset):
    """The voxels of a volume. The voxel (i, j, k) is at the point ``(i + 0.5, j + 0.5, k + 0.5) * voxel_size``.

    In training, an item is one voxel, and a batch is looked up at once. In test mode, the only item is the volume.

    Args:
        path: a ``.npy`` file of shape [D0, D1, D2], or None for :func:`make_volume`.
        volume_size: the length that the longest side is scaled to.
        test_mode: whether the whole volume is the only item.
    """

    def __init__(self, path: str | None = None, volume_size: float = 10.0, test_mode: bool = False) -> None:
        volume = load_array(path) if path else make_volume()
        check_finite("VolumeDataset", volume=volume)
        self.test_mode = test_mode
        self.metainfo = {"voxel_size": volume_size / max(volume.shape), "value_scale": np.abs(volume).max()}
        places = torch.from_numpy(np.argwhere(np.ones(volume.shape)) + 0.5)
        self.points = (places * self.metainfo["voxel_size"]).float()
        self.values = torch.from_numpy(volume / self.metainfo["value_scale"]).float().flatten()

    def __len__(self) -> int:
        return 1 if self.test_mode else len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        chosen = slice(None) if self.test_mode else list(indices)
        sample = FieldDataSample(gt_field=self.values[chosen])
        return [{"inputs": self.points[chosen], "data_samples": sample}]


def make_volume(size: int = 48, num_blobs: int = 12, seed: int = 0) -> np.ndarray:
    """Return a volume [size, size, size] of smooth stretched blobs, some of which are negative."""
    rng = np.random.default_rng(seed)
    points = (np.indices((size, size, size)).T + 0.5) / size
    volume = np.zeros((size, size, size))
    for _ in range(num_blobs):
        offsets = (points - rng.uniform(0.2, 0.8, 3)) / rng.uniform(0.05, 0.14, 3)
        volume += rng.choice([1.0, 0.7, -0.4]) * np.exp(-0.5 * (offsets**2).sum(-1))
    return volume


@HOOKS.register_module()
class InitializeFieldHook(Hook):
    """Initializes the Gaussians from the training data before the first iteration of a run from scratch."""

    def before_train(self, runner: Any) -> None:
        """Place the Gaussians."""
        if runner.iter == 0:
            data = runner.train_dataloader.dataset
            runner.model.initialize(data.points, data.values, seed=0)


@METRICS.register_module()
class FieldMetric(BaseMetric):
    """``mse``, and ``psnr`` = 10 log10(range^2 / mse) in dB, where the range is max - min of the truth."""

    default_prefix = "field"
    metric_names = ("mse", "psnr")

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the truths and the predictions of a batch."""
        for sample in data_samples:
            self.results.append(torch.stack((sample["gt_field"], sample["pred_field"])).double())

    def compute_metrics(self, results: list[Tensor]) -> dict[str, float]:
        """Return the metrics over all points."""
        truth, field = torch.cat(results, 1)
        mse = (field - truth).square().mean()
        extent = truth.max() - truth.min()
        return {"mse": float(mse), "psnr": float(10 * (extent.square() / mse).log10())}
