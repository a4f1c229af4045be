"""SparseDrive over two frames against golden vectors: outputs, results, losses and gradients.

The large vectors hold numbers of the original; the small ones (see tests/make_golden.py) hold numbers of a run that
equalled the original on the large ones, of the same configurations with other weights and images.
"""

import copy

import pytest
import torch
from golden import available, every, golden, sampled, under
from sparsedrive_golden import build, close, evaluate, features_and_depth, part, train

STAGES = available(*(f"sparsedrive_{kind}stage{stage}" for kind in ("small_", "") for stage in (1, 2)))


@pytest.fixture(scope="module", params=STAGES)
def case(request):
    arrays = golden(request.param)
    return arrays, build(arrays)


def check(arrays, prefix, values, tolerance=4e-5):  # measured: 2.3e-5, with norms folded into convolutions
    """Compare every array stored under ``prefix`` with the entry of that name; returns the names compared."""
    names = []
    for stored, expected in under(arrays, prefix).items():
        name, step = every(stored)
        close(sampled(torch.as_tensor(part(values, name)), step), expected, tolerance)
        names.append(name)
    return names


def test_two_frames(case):
    arrays, model = case
    for index, values in enumerate(evaluate(model, arrays)):
        prefix = f"output/frame{index}"
        for name in ("det", "map", "motion", "planning"):
            assert (values[name] is None) == (not under(arrays, f"{prefix}/{name}"))
            if values[name] is not None:
                assert len(check(arrays, f"{prefix}/{name}", values[name])) > 3
        # cls_scores: ours belong to their boxes. planning scores: see the tests of the planning decoder.
        decoded = {
            key: value
            for key, value in arrays.items()
            if "/cls_scores" not in key.replace("_aligned", "") and "/decoded/planning" not in key
        }
        assert len(check(decoded, f"{prefix}/decoded", values["decoded"])) > 10


def test_features_and_depth(case):
    arrays, model = case
    names = [
        name
        for part_name, values in features_and_depth(model, arrays).items()
        for name in check(arrays, f"output/frame0/{part_name}", values)
    ]
    assert len(names) == 4 + 3


def test_losses_and_gradients(case):
    arrays, model = case
    for index, step in enumerate(train(copy.deepcopy(model), arrays)):
        expected = under(arrays, f"loss/frame{index}")
        assert set(step.losses) == set(expected)
        for name, value in step.losses.items():
            close(value, expected[name], 1e-5)
        assert len(check(arrays, f"train/frame{index}", step.outs)) == 8
        names = [str(name) for name in arrays[f"grad_norm/frame{index}/names"]]
        for name, norm in zip(names, arrays[f"grad_norm/frame{index}/values"], strict=True):
            assert step.grad_norms[name] == pytest.approx(norm, rel=1e-3, abs=1e-5), name
