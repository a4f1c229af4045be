"""MuonWithAuxAdam: which parameters it orthogonalises, by how much, beside torch's optimizers, and in runs."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from toy_run import check_two_halves, losses

from visdet.engine import MuonWithAuxAdam


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    """Two equal shapes, a tall and a wide matrix, one that is too small, a vector and a convolution."""
    torch.manual_seed(0)
    shapes = [(32, 32), (32, 32), (96, 32), (32, 96), (6, 32), (32,), (8, 4, 3, 3)]
    return [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]


def with_gradients(params: list[nn.Parameter], seed: int = 1) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape).to(param)
    return params


def copies_of(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


def test_matrices_move_as_by_torchs_muon_and_the_rest_as_by_adamw(device):
    ours, theirs = parameters(device), parameters(device)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    both = MuonWithAuxAdam(ours, momentum=0.9, **options)
    muon = torch.optim.Muon(theirs[:4], momentum=0.9, adjust_lr_fn="match_rms_adamw", **options)
    adam = torch.optim.AdamW(theirs[4:], **options)
    start = copies_of(ours)
    for seed in range(3):
        for optimizer, params in ((both, [ours]), (muon, [theirs]), (adam, [theirs])):
            with_gradients(params[0], seed)
            optimizer.step()
    for k, (one, other, before) in enumerate(zip(ours, theirs, start, strict=True)):
        # torch's Muon rounds to bfloat16.
        difference = (one - other).norm() / (other - before).norm()
        assert difference < (3e-2 if k < 4 else 1e-6), k


def test_gradients_stay_and_missing_ones_move_nothing():
    params = with_gradients(parameters())
    params[1].grad = None
    before = copies_of(params)
    kept = [param.grad for param in params]
    MuonWithAuxAdam(params, lr=1e-2).step()
    assert all(param.grad is grad for param, grad in zip(params, kept, strict=True))
    moved = [not torch.equal(param, was) for param, was in zip(params, before, strict=True)]
    assert moved == [True, False, True, True, True, True, True]


@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_state_goes_on_alike(fused):
    ours = parameters()
    optimizer = MuonWithAuxAdam(ours, lr=1e-2, fused=fused)
    with_gradients(ours, 1)
    optimizer.step()
    others = copy.deepcopy(ours)
    loaded = MuonWithAuxAdam(others, lr=1e-2, fused=fused)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, params in ((optimizer, ours), (loaded, others)):
        with_gradients(params, 2)
        one.step()
    assert_close(ours, others, rtol=0, atol=0)
    assert "exp_avg_sq" not in optimizer.state[ours[0]], "a matrix needs one moment"


def test_infinite_gradients_under_a_scaler_skip_the_whole_step():
    params = with_gradients(parameters())
    before = copies_of(params)
    params[0].grad[0, 0] = torch.inf
    optimizer = MuonWithAuxAdam(params, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert_close(params, before, rtol=0, atol=0)


def test_two_halves_of_a_run_equal_the_whole(tmp_path):
    """Schedules and paramwise_cfg set the rates, as with any optimizer."""
    muon = {"type": "MuonWithAuxAdam", "lr": 1e-2, "min_size": 2}
    wrapper = {"type": "OptimWrapper", "optimizer": muon, "paramwise_cfg": {"bias_lr_mult": 0.5}}
    whole, _ = check_two_halves(tmp_path, 9, optim_wrapper=wrapper)
    assert any("momentum_buffer" in state for state in whole.optim_wrapper.optimizer.state.values())
    assert losses(whole)[20] < losses(whole)[1]


def square() -> nn.Parameter:
    return nn.Parameter(torch.ones(20, 20))


@pytest.mark.parametrize("given", [{"ns_steps": 0}, {"min_size": None}, {"momentum": 1.0}])
def test_wrong_arguments_are_named(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))} must be"):
        MuonWithAuxAdam([square()], **given)


def moved(optimizer, parameter) -> torch.Tensor:
    before = parameter.detach().clone()
    parameter.grad = torch.arange(400.0).view(20, 20).sin()
    optimizer.step()
    return parameter.detach() - before


def test_matrices_are_maximized_where_all_others_are():
    ups_and_downs = []
    for maximize in (False, True):
        matrix = square()
        optimizer = MuonWithAuxAdam([matrix], lr=1e-2, weight_decay=0, maximize=maximize)
        ups_and_downs.append(moved(optimizer, matrix))
    assert ups_and_downs[0].abs().max() > 0 and torch.allclose(ups_and_downs[0], -ups_and_downs[1], atol=1e-6)


def test_groups_have_values_of_their_own_which_copies_keep():
    matrices = [square() for _ in range(2)]
    groups = [{"params": matrices[:1], "momentum": 0.5}, {"params": matrices[1:], "min_size": 30}]
    optimizer = MuonWithAuxAdam(groups, ns_steps=3)
    assert [group["momentum"] for group in copy.deepcopy(optimizer).param_groups] == [0.5, 0.95]
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    assert ["momentum_buffer" in optimizer.state[matrix] for matrix in matrices] == [True, False]


def test_states_of_adamw_and_of_earlier_versions_are_loaded():
    matrix = square()
    adamw = torch.optim.AdamW([matrix])
    moved(adamw, matrix)
    optimizer = MuonWithAuxAdam([matrix], momentum=0.5)
    optimizer.load_state_dict(adamw.state_dict())
    assert moved(optimizer, matrix).abs().max() > 0
    assert optimizer.param_groups[0]["momentum"] == 0.5 and "exp_avg" not in optimizer.state[matrix]
