"""A field of 3-D Gaussians with learnable means, covariances and weights."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import InstanceData
from torch import Tensor, nn

from visdet.checks.arguments import Above0, Positive
from visdet.errors import InvalidInputError, check_choice
from visdet.ops import gaussian_field
from visdet.registry import MODELS
from visdet.structures import FieldDataSample

from .base_detector import BaseDetector

_SAMPLES_PER_CLUSTER = 50  # number of points per Gaussian that k-means gets
# The halves of a split Gaussian are moved by this fraction of the standard deviation along its longest axis. Along this
# axis, they keep 0.8 of the deviation.
_SPLIT_OFFSET = 0.6
_LOG_SCALES = (0, 2, 5)  # columns of cov_tril that hold the logarithms of the factor's diagonal


@MODELS.register_module()
class PointsDataPreprocessor(BaseDataPreprocessor):
    """Joins the points of all chunks of a batch, and moves points and samples to the device."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return ``dict(inputs=points [B, 3], data_samples=[FieldDataSample of each chunk])``."""
        data = self.cast_data(data)
        return {"inputs": torch.cat(data["inputs"]), "data_samples": data["data_samples"]}


@MODELS.register_module()
class LearnableGaussianField(BaseDetector):
    """``field(x) = sum_n weights[n] * exp(-|L_n^-1 (x - means[n])|^2 / 2)``, with lower Cholesky factors L_n.

    The parameters are, in this order, ``means`` [N, 3], ``cov_tril`` [N, 6] = (log l00, l10, log l11, l20, l21,
    log l22), and ``weights`` [N]. With ``use_full_cov=False``, ``log_scales`` [N, 3], the logarithms of the standard
    deviations along the axes, replace ``cov_tril``. In a new field, the means are uniform in the volume, the Gaussians
    are round with the standard deviation volume_size / N^(1/3), and the weights are 1. :meth:`initialize` sets them by
    data.

    Args:
        num_gaussians: N.
        volume_size: length of the sides of the volume, one number or one for each axis. The volume begins at 0.
        use_full_cov: whether covariances are full. Otherwise they are diagonal.
        tolerance: that of :func:`visdet.ops.gaussian_field`. With 0 every pair is added. Above 0, far pairs are left
            out, so that no value is off by more than this.
        data_preprocessor: config or module that turns collated chunks into a batch.

    Raises:
        ValueError: ``num_gaussians`` or ``volume_size`` is not positive.

    Source: the public seed of this package. Differences: the seed also adds 1e-6 to the diagonal of the covariance, and
    its kernel reads a diagonal covariance as a factor. Here the parameters have the meaning above in both modes.
    """

    input_shape: ClassVar[tuple[str, ...]] = ("M", "3")
    sample_type: ClassVar[type[FieldDataSample]] = FieldDataSample

    def __init__(
        self,
        num_gaussians: Positive,
        volume_size: Above0 | tuple[Above0, Above0, Above0] = 10.0,
        use_full_cov: bool = True,
        tolerance: float = 0.0,
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
    ) -> None:
        super().__init__(data_preprocessor or PointsDataPreprocessor())
        sides = torch.as_tensor(volume_size, dtype=torch.get_default_dtype(), device="cpu")
        sides = sides.expand(3)
        self.num_gaussians = int(num_gaussians)
        self.use_full_cov = use_full_cov
        self.tolerance = tolerance
        log_scales = (sides / self.num_gaussians ** (1 / 3)).log()
        self.means = nn.Parameter(torch.rand(self.num_gaussians, 3) * sides.to(torch.rand(0).device))
        if use_full_cov:
            cov_tril = torch.zeros(self.num_gaussians, 6)
            cov_tril[:, _LOG_SCALES] = log_scales.to(cov_tril)
            self.cov_tril = nn.Parameter(cov_tril)
        else:
            self.log_scales = nn.Parameter(log_scales.to(self.means).repeat(self.num_gaussians, 1))
        self.weights = nn.Parameter(torch.ones(self.num_gaussians))

    @property
    def cholesky(self) -> Tensor:
        """The lower factors [N, 3, 3] of the covariances."""
        if not self.use_full_cov:
            return torch.diag_embed(self.log_scales.exp())
        log_l00, l10, log_l11, l20, l21, log_l22 = self.cov_tril.unbind(1)
        zero = torch.zeros_like(l10)
        rows = (log_l00.exp(), zero, zero, l10, log_l11.exp(), zero, l20, l21, log_l22.exp())
        return torch.stack(rows, 1).view(-1, 3, 3)

    def get_covariance(self) -> Tensor:
        """Return the covariances [N, 3, 3]."""
        return self.cholesky @ self.cholesky.mT

    def forward(
        self,
        inputs: Tensor,  # [M, 3]; in mode 'tensor' [..., 3], or [3] for one point
        data_samples: Sequence[FieldDataSample] | None = None,
        mode: str | Callable[[Tensor, Sequence[Any]], Any] = "tensor",
    ) -> Tensor | dict[str, Tensor] | list[FieldDataSample]:
        """Return the field at points, in the wider dtype of points and parameters.

        Args:
            inputs: the points. With samples, the points of the samples follow one another.
            data_samples: chunks of the points, with the values to fit as ``gt_field``.
            mode: 'tensor' returns the field [...]. 'loss' returns ``dict(loss_mse=...)``, the mean squared error.
                'predict' returns the samples with predictions. If there are no samples, it returns a new one with all
                points.

        Raises:
            ValueError: the shapes do not fit, or the mode is unknown.
            TypeError: the mode is 'loss' or 'predict', and ``inputs`` are not [M, 3].
        """
        if mode == "tensor":
            return self.raw_outputs(inputs)
        if mode == "predict" and data_samples is None:
            data_samples = [FieldDataSample()]
        return super().forward(inputs, data_samples, mode)

    def raw_outputs(self, inputs: Tensor, data_samples: Sequence[FieldDataSample] | None = None) -> Tensor:
        """Return the field [...] at points [..., 3]. The samples have no effect."""
        if inputs.dim() == 0 or inputs.shape[-1] != 3:
            raise ValueError(
                f"LearnableGaussianField: points must be [..., 3] or [3], got {list(inputs.shape)}"
            )
        points = inputs.reshape(-1, 3).to(torch.promote_types(inputs.dtype, self.means.dtype))
        field = gaussian_field(points, self.means, self.cholesky, self.weights, self.tolerance)
        return field.view(inputs.shape[:-1])

    def loss(self, inputs: Tensor, data_samples: Sequence[FieldDataSample]) -> dict[str, Tensor]:
        """Return ``loss_mse``, the mean squared error over the points of all samples."""
        field = self.raw_outputs(inputs)
        values = torch.cat([sample.gt_field for sample in data_samples])
        return {"loss_mse": (field - values.to(field.dtype)).square().mean()}

    def predict(self, inputs: Tensor, data_samples: Sequence[FieldDataSample]) -> list[FieldDataSample]:
        """Return the samples with ``pred_field`` and ``pred_gaussians``. One without ``gt_field`` has all points."""
        field = self.raw_outputs(inputs)
        sizes = [len(sample.get("gt_field", field)) for sample in data_samples]
        heaviest = self.masses().argsort(descending=True)
        gaussians = InstanceData(
            means=self.means[heaviest],
            covariances=self.get_covariance()[heaviest],
            weights=self.weights[heaviest],
        )
        for sample, values in zip(data_samples, field.split(sizes), strict=True):
            sample.set_field(values, "pred_field")
            sample.set_field(gaussians, "pred_gaussians", dtype=InstanceData)
        return list(data_samples)

    @torch.no_grad()
    def initialize(
        self,
        points: Tensor,  # [M, 3]
        values: Tensor,  # [M]
        method: str = "kmeans",
        seed: int = 0,
    ) -> None:
        """Place the Gaussians where the values are large.

        Points are drawn with a probability proportional to the magnitude of their value. 'kmeans' sets the means to the
        centres of clusters and the standard deviations to their radii. 'random' sets the means to drawn points and the
        standard deviations to half the mean distance of evenly spread Gaussians. Each weight is the value at the
        nearest drawn point divided by the unweighted field at the mean, so that overlapping Gaussians do not add up to
        too much.

        Args:
            points, values: the data. method: 'kmeans' or 'random'. seed: seed of the random numbers.

        Raises:
            ValueError: the method is unknown, the shapes do not fit, or the values are not finite or all zero.
        """
        check_choice("LearnableGaussianField.initialize: method", method, ("kmeans", "random"))
        if points.dim() != 2 or points.shape[1] != 3 or values.shape != points.shape[:1]:
            raise InvalidInputError(
                "LearnableGaussianField.initialize: points must be [M, 3] and values [M], "
                f"got {list(points.shape)} and {list(values.shape)}"
            )
        points, values = points.detach().cpu().double(), values.detach().cpu().double()
        mass = values.abs().cumsum(0)
        if len(mass) == 0 or not (bool(mass[-1].isfinite()) and mass[-1] > 0):
            raise InvalidInputError(
                "LearnableGaussianField.initialize: values must be finite and not all zero "
                f"({len(values)} values)"
            )
        N = self.num_gaussians
        rng = np.random.default_rng(seed)
        count = N * _SAMPLES_PER_CLUSTER if method == "kmeans" else N
        drawn = torch.from_numpy(rng.random(count)) * mass[-1]
        chosen = torch.searchsorted(mass, drawn, right=True).clamp(max=len(mass) - 1)
        extent = (points.amax(0) - points.amin(0)).clamp(min=1e-6)
        spacing = float(extent.prod() / N) ** (1 / 3)
        # Two Gaussians at the same place would always have the same gradients.
        sample = points[chosen] + torch.from_numpy(rng.normal(0, 0.05 * spacing, (count, 3)))
        means, scales, nearest = sample[:N], torch.full((N,), 0.5 * spacing, dtype=torch.float64), chosen[:N]
        if method == "kmeans":
            from scipy.cluster.vq import kmeans2  # They are slow to import, and most runs do not need them.
            from scipy.spatial import KDTree

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # A cluster without points keeps its centre.
                centres, label = kmeans2(sample.numpy(), sample[:N].numpy(), iter=10, minit="matrix")
            means, cluster = torch.from_numpy(centres), torch.from_numpy(label).long()
            squares = (sample - means[cluster]).square().sum(1)
            sizes = torch.bincount(cluster, minlength=N).clamp(min=1)
            scales = (torch.zeros(N, dtype=torch.float64).index_add_(0, cluster, squares) / sizes / 3).sqrt()
            nearest = chosen[KDTree(sample.numpy()).query(centres)[1]]
        self._set_round(means, scales.clamp(min=0.05 * spacing), values[nearest])

    def _set_round(self, means: Tensor, scales: Tensor, values: Tensor) -> None:
        self.means.copy_(means)
        self._set_factors(slice(None), torch.diag_embed(scales[:, None].expand(-1, 3)))
        self.weights.fill_(1.0)
        self.weights.copy_(values.to(self.weights) / self(self.means).to(self.weights))

    def _set_factors(self, rows: Tensor | slice, factors: Tensor) -> None:
        """Let the covariances of some Gaussians have these lower factors [n, 3, 3]."""
        log_scales = factors.diagonal(dim1=1, dim2=2).log()
        if self.use_full_cov:
            entries = factors[:, (0, 1, 1, 2, 2, 2), (0, 0, 1, 0, 1, 2)]
            entries[:, _LOG_SCALES] = log_scales
            self.cov_tril[rows] = entries.to(self.cov_tril)
        else:
            self.log_scales[rows] = log_scales.to(self.log_scales)

    @torch.no_grad()
    def masses(self) -> Tensor:
        """Return the absolute integral of each Gaussian, [N], without the constant (2 pi)^(3/2)."""
        return self.weights.abs() * self.cholesky.diagonal(dim1=1, dim2=2).prod(1)

    @torch.no_grad()
    def split(self, indices: Tensor, into: Tensor) -> None:
        """Split Gaussians along their longest axes. Each second half replaces another Gaussian.

        The two halves together have the mass, mean and covariance of the whole.

        Args:
            indices: [K], the Gaussians to split. No Gaussian may occur twice.
            into: [K], the Gaussians that the second halves replace. They must not be in ``indices``.
        """
        variances, axes = torch.linalg.eigh(self.get_covariance()[indices].double())
        if self.use_full_cov:
            longest, variance = axes[:, :, 2], variances[:, 2]
        else:
            variance, axis = self.log_scales[indices].double().mul(2).exp().max(1)
            longest = nn.functional.one_hot(axis, 3).double()
        offset = (_SPLIT_OFFSET * variance.sqrt()[:, None] * longest).to(self.means)
        means = self.means[indices]
        weight = self.weights[indices] / (2 * (1 - _SPLIT_OFFSET**2) ** 0.5)
        shrink = _SPLIT_OFFSET**2 * variance[:, None, None] * longest[:, :, None] * longest[:, None]
        factors = torch.linalg.cholesky(self.get_covariance()[indices].double() - shrink).to(self.means)
        for half, sign in ((indices, 1.0), (into, -1.0)):
            self.means[half] = means + sign * offset
            self.weights[half] = weight
            self._set_factors(half, factors)
