"""The extensions of deformable aggregation in both layouts, with and without depth."""

import pytest
import torch
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet import ops
from visdet.compat import aggregation_ext

B, V, Q, P, C, D, G = 2, 3, 4, 5, 8, 6, 2
SHAPES = [[4, 5], [2, 3]]
ROWS = 28  # of a camera, of which 26 belong to maps


def arguments(device="cpu", dtype=torch.float32, has_depth=False):
    """Return the arguments of an extension with each camera apart, with tables of int32 on the device."""
    generator = generator_of(0)
    features = torch.randn(B, V, ROWS, C + (D if has_depth else 0), generator=generator).to(dtype)
    locations = torch.rand(B, Q * P, V, 2, generator=generator) * 1.4 - 0.2
    if has_depth:
        depths = torch.rand(B, Q * P, V, 1, generator=generator) * (D + 3) - 2
        locations = torch.cat([locations, depths], -1)
    weights = torch.rand(B, Q * P, V, 2, G, generator=generator)
    tables = (torch.tensor(SHAPES, dtype=torch.int32), torch.tensor([1, 21], dtype=torch.int32))
    return [tensor.to(device) for tensor in (features, *tables, locations, weights)]


def by_definition(features, shapes, starts, locations, weights, points=1):
    """Return the result in float64, and the leaves that its gradients belong to."""
    leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in (features, locations, weights)]
    tables = (shapes.cpu().expand(V, -1, -1), starts.cpu() + ROWS * torch.arange(V)[:, None])
    flat, location, weight = leaves[0].flatten(1, 2), *(one.unflatten(1, (-1, points)) for one in leaves[1:])
    if location.shape[-1] == 2:
        return ops.deformable_aggregation_reference(flat, *tables, location, weight), leaves
    columns = flat.split([C, D], -1)
    return ops.deformable_aggregation_with_depth_reference(*columns, *tables, location, weight), leaves


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_depth", [False, True], ids=["plain", "depth"])
@pytest.mark.parametrize("is_apart", [True, False], ids=["apart", "one-run"])
def test_both_layouts_and_their_gradients(device, dtype, has_depth, is_apart):
    features, shapes, starts, locations, weights = arguments(device, dtype, has_depth)
    points = 1 if is_apart else P
    wanted, leaves = by_definition(features, shapes, starts, locations, weights, points)
    wanted_grads = torch.autograd.grad(wanted.sum(), leaves)
    if not is_apart:
        shapes, starts = aggregation_ext.tables_of_cameras(features, shapes, starts)
        features = features.flatten(1, 2)
        locations, weights = locations.unflatten(1, (Q, P)), weights.unflatten(1, (Q, P))
    call = (features, shapes, starts, locations, weights, *([D] if has_depth else []))
    name = "deformable_aggregation_with_depth" if has_depth else "deformable_aggregation"
    out = getattr(aggregation_ext, f"{name}_forward")(*call)
    grads = [torch.zeros_like(tensor) for tensor in (features, locations, weights)]
    assert getattr(aggregation_ext, f"{name}_backward")(*call, torch.ones_like(out), *grads) is None
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    assert_close(out.cpu().double(), wanted.detach(), rtol=tolerance, atol=tolerance)
    for found, grad in zip(grads, wanted_grads, strict=True):
        scale = tolerance * float(grad.abs().max())
        found = found.cpu().double().view(grad.shape)
        assert_close(found, grad, rtol=tolerance, atol=scale)


def test_features_are_not_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "deformable_aggregation_with_depth", lambda *tensors: seen.extend(tensors))
    features, *others = arguments(has_depth=True)
    aggregation_ext.deformable_aggregation_with_depth_forward(features, *others, D)
    assert seen[0].data_ptr() == features.data_ptr() and seen[1].data_ptr() == features[..., C:].data_ptr()


@pytest.mark.parametrize(
    ("changed", "shape", "message"),
    [
        (0, (B, C), "features must be .* all cameras in one run"),
        (3, (B, Q, P, V, 2), "locations must be .* each camera apart"),
        (4, (B, Q * P, V, 2), "weights must be .* each camera apart"),
        (3, (B, 7, V, 2), "weights must be .* each camera apart"),
    ],
)
def test_errors_say_which_layout_was_understood(changed, shape, message):
    call = arguments()
    call[changed] = torch.ones(shape, dtype=call[changed].dtype)
    with pytest.raises(RuntimeError, match=message):
        aggregation_ext.deformable_aggregation_forward(*call)


def test_depths_must_be_columns_of_the_features():
    with pytest.raises(RuntimeError, match=r"-1, 15.* each camera apart"):
        aggregation_ext.deformable_aggregation_with_depth_forward(*arguments(has_depth=True), 15)
