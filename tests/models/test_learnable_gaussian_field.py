"""LearnableGaussianField: golden vectors, by hand, both covariance modes, its start from data and its splits."""

import math

import pytest
import torch
from golden import golden, under

from visdet.models import LearnableGaussianField
from visdet.ops import gaussian_field_reference
from visdet.structures import FieldDataSample


def make_field(N=5, use_full_cov=True, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    field = LearnableGaussianField(N, 4.0, use_full_cov, **options).to(dtype)
    with torch.no_grad():
        for parameter in field.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return field


def test_parameters_are_the_seeds():
    full, diagonal = LearnableGaussianField(8, 10.0), LearnableGaussianField(8, 10.0, use_full_cov=False)
    assert {name: tuple(value.shape) for name, value in full.state_dict().items()} == {
        "means": (8, 3),
        "cov_tril": (8, 6),
        "weights": (8,),
    }
    assert [name for name, _ in full.named_parameters()] == ["means", "cov_tril", "weights"]
    assert [name for name, _ in diagonal.named_parameters()] == ["means", "log_scales", "weights"]
    for field in (full, diagonal):
        assert torch.allclose(field.get_covariance(), 25.0 * torch.eye(3).expand(8, 3, 3))  # (10 / 8^(1/3))^2
        assert ((field.means >= 0) & (field.means <= 10)).all() and (field.weights == 1).all()


def test_golden_vectors():
    arrays = under(golden("gaussian_field"), "cov_tril")
    field = LearnableGaussianField(6).double()
    field.load_state_dict(
        {
            "means": arrays["input/means"],
            "cov_tril": arrays["input/cov_tril"],
            "weights": arrays["input/weights"],
        }
    )
    points = arrays["input/points"].requires_grad_()
    assert torch.allclose(field.cholesky, arrays["output/cov_chol"], rtol=1e-12)
    output = field(points)
    assert torch.allclose(output, arrays["output/field"], rtol=1e-11)
    output.backward(arrays["input/grad_field"])
    for name, tensor in [("points", points), *field.named_parameters()]:
        assert torch.allclose(tensor.grad, arrays[f"output/field/grad_{name}"], rtol=1e-9, atol=1e-13), name


@pytest.mark.parametrize("use_full_cov", [True, False])
def test_one_point_and_batches_agree_with_the_definition(use_full_cov):
    field, points = make_field(use_full_cov=use_full_cov), torch.rand(2, 7, 3, dtype=torch.float64) * 4
    expected = gaussian_field_reference(points.view(-1, 3), field.means, field.cholesky, field.weights)
    assert torch.allclose(field(points), expected.view(2, 7))
    assert torch.allclose(field(points[1, 3]), expected.view(2, 7)[1, 3])
    assert field(points[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("use_full_cov", [True, False])
def test_gradients_reach_every_parameter(use_full_cov):
    field, points = make_field(3, use_full_cov), torch.rand(4, 3, dtype=torch.float64) * 4
    names = [name for name, _ in field.named_parameters()]

    def loss(*tensors):
        return torch.func.functional_call(field, dict(zip(names, tensors, strict=True)), (points,))

    leaves = tuple(parameter.detach().clone().requires_grad_() for parameter in field.parameters())
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_type_and_device(dtype, device):
    field, points = make_field(dtype=dtype).to(device), torch.rand(6, 3, device=device) * 4
    output = field(points)
    assert output.dtype == torch.promote_types(dtype, torch.float32) and output.device.type == device
    exact = make_field(dtype=dtype).to("cpu", torch.float64)(points.double().cpu())
    assert torch.allclose(output.double().cpu(), exact, rtol=1e-2, atol=1e-2)
    output.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == dtype for p in field.parameters())


def test_modes():
    field, points, values = make_field(), torch.rand(6, 3), torch.rand(6)
    samples = [FieldDataSample(gt_field=part) for part in values.split([4, 2])]
    loss = field(points, samples, mode="loss")["loss_mse"]
    assert loss.item() == pytest.approx((field(points) - values).square().mean().item())
    first, second = field(points, samples, mode="predict")
    assert torch.equal(torch.cat([first.pred_field, second.pred_field]), field(points))
    assert first is samples[0] and len(second.pred_field) == 2
    (everywhere,) = field(points, mode="predict")
    assert torch.equal(everywhere.pred_field, field(points))


def test_predictions_hold_the_gaussians_the_heaviest_first():
    field, points = make_field(), torch.rand(6, 3)
    (sample,) = field(points, mode="predict")
    found = sample.pred_gaussians
    order = field.masses().argsort(descending=True)
    assert torch.equal(found.means, field.means[order]) and torch.equal(found.weights, field.weights[order])
    again = gaussian_field_reference(
        points.double(), found.means, torch.linalg.cholesky(found.covariances), found.weights
    )
    assert torch.allclose(again, sample.pred_field)


def test_rejects():
    field = make_field()
    with pytest.raises(ValueError, match="num_gaussians must be"):
        LearnableGaussianField(0)
    for size in (0.0, float("nan"), (1.0, 2.0)):
        with pytest.raises(ValueError, match="volume_size"):
            LearnableGaussianField(3, size)
    for call, error, message in (
        (lambda: field(torch.zeros(5, 2)), ValueError, r"points must be \[..., 3\] or \[3\], got \[5, 2\]"),
        (
            lambda: field(torch.zeros(5, 3), [FieldDataSample(gt_field=torch.zeros(4))], mode="loss"),
            RuntimeError,
            r"size of tensor a \(5\) must match the size of tensor b \(4\)",
        ),
        (
            lambda: field(torch.zeros(2, 5, 3), mode="predict"),
            TypeError,
            r"inputs must be a \[M, 3\] tensor, got \(2, 5, 3\)",
        ),
        (
            lambda: field(torch.zeros(5, 3), mode="train"),
            ValueError,
            "mode must be 'tensor', 'predict' or 'loss', got 'train'",
        ),
        (
            lambda: field.initialize(torch.zeros(5, 3), torch.ones(5), "grid"),
            ValueError,
            "method must be 'kmeans' or 'random', got 'grid'",
        ),
        (
            lambda: field.initialize(torch.zeros(5, 3), torch.ones(4)),
            ValueError,
            r"points must be \[M, 3\] and values \[M\], got \[5, 3\] and \[4\]",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    for values in (torch.zeros(5), torch.full((5,), math.nan), torch.zeros(0)):
        with pytest.raises(ValueError, match="values must be finite and not all zero"):
            field.initialize(torch.zeros(len(values), 3), values)


@pytest.mark.parametrize("method", ["kmeans", "random"])
@pytest.mark.parametrize("use_full_cov", [True, False])
def test_starts_where_the_values_are(method, use_full_cov):
    points = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0)) * 10
    centres = torch.tensor([[2.0, 2.0, 2.0], [8.0, 7.0, 3.0]])
    values = torch.exp(-0.5 * torch.cdist(points, centres).square()) @ torch.tensor([1.0, -0.5])
    field = LearnableGaussianField(20, 10.0, use_full_cov)
    field.initialize(points, values, method)
    distances = torch.cdist(field.means, centres).amin(1)
    assert (distances < 4).all() and distances.mean() < 2.2
    is_second = torch.cdist(field.means, centres).argmin(1) == 1
    assert (field.weights[is_second] < 0).all() and (field.weights[~is_second] > 0).all()
    error = (field(points) - values).square().mean() / values.square().mean()
    assert error < 0.8  # better than nothing at all
    again = LearnableGaussianField(20, 10.0, use_full_cov)
    again.initialize(points, values, method)
    assert all(torch.equal(*pair) for pair in zip(field.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("use_full_cov", [True, False])
def test_split_keeps_mass_mean_and_covariance(use_full_cov):
    field = make_field(4, use_full_cov)
    masses, means = field.masses(), field.means.detach().clone()
    covariances, weights = field.get_covariance().detach(), field.weights.detach().clone()
    field.split(torch.tensor([2, 0]), into=torch.tensor([1, 3]))
    for whole, other in ((2, 1), (0, 3)):
        halves = torch.tensor([whole, other])
        assert torch.allclose(field.masses()[halves], masses[whole] / 2)
        assert (field.weights[halves].sign() == weights[whole].sign()).all()
        assert torch.allclose(field.means[halves].mean(0), means[whole])
        offsets = field.means[halves] - means[whole]
        assert torch.linalg.vector_norm(offsets, dim=1).min() > 0
        spread = field.get_covariance()[halves] + offsets[:, :, None] * offsets[:, None]
        assert torch.allclose(spread.mean(0), covariances[whole])
