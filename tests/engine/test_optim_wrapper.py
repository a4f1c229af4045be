"""Optimizer wrappers: mixed precision on the CPU, and on the GPU where there is one; groups of parameters."""

import copy

import pytest
import torch
from mmengine.optim import BaseOptimWrapper, MultiStepLR
from mmengine.optim import OptimWrapper as MMEngineOptimWrapper
from torch import nn
from torch.testing import assert_close
from toy_run import losses, toy_runner, train

from visdet.engine import AmpOptimWrapper, ConfigError, OptimWrapper, enable_amp
from visdet.engine.optim import options


def wrapper(model: nn.Module, lr: float = 0.1, **options) -> AmpOptimWrapper:
    return AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=lr), **options)


def linear(device: str = "cpu") -> nn.Linear:
    model = nn.Linear(4, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    return model


def test_forward_runs_in_bfloat16_and_the_rest_in_float32(device):
    model = linear(device)
    amp = wrapper(model)
    with amp.optim_context(model):
        output = model(torch.full((2, 4), 0.5, device=device))
    assert output.dtype is torch.bfloat16
    amp.update_params(output.float().sum())
    assert model.weight.dtype is torch.float32
    assert torch.allclose(model.weight, torch.full((1, 4), 0.9, device=device), atol=1e-3)
    assert "loss_scaler" not in amp.state_dict()


@pytest.mark.cuda
def test_float16_scales_the_loss_and_clips_unscaled_gradients():
    model = linear("cuda")
    amp = wrapper(model, lr=1.0, dtype="float16", loss_scale=128.0, clip_grad={"max_norm": 0.5})
    with amp.optim_context(model):
        loss = model(torch.ones(1, 4, device="cuda")).float().sum()
    amp.update_params(loss)
    assert torch.allclose(model.weight, torch.full((1, 4), 0.75, device="cuda"), atol=1e-3)
    assert amp.state_dict()["loss_scaler"]["scale"] == 128.0
    weight = model.weight.detach().clone()
    with amp.optim_context(model):
        loss = model(torch.full((1, 4), float("inf"), device="cuda")).float().sum()
    amp.update_params(loss)
    assert torch.equal(model.weight, weight), "a step with infinite gradients is skipped"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype must be 'bfloat16' or 'float16', got 'int8'"),
        ({"loss_scale": "static"}, "loss_scale must be"),
        ({"dtype": torch.float32}, "got torch.float32"),
    ],
)
def test_rejections(options, message):
    with pytest.raises(ValueError, match=message):
        wrapper(linear(), **options)


def test_amp_training_learns_and_stays_near_float32(tmp_path):
    runner = toy_runner(tmp_path / "amp", optim_wrapper__type="AmpOptimWrapper", train_cfg__max_iters=30)
    runner.train()
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    full = train(tmp_path / "float32", train_cfg__max_iters=30)
    found, expected = losses(runner), losses(full)
    assert found[30] < 0.8 * found[1]
    assert found != expected, "the forward pass ran in another precision"
    assert found[1] == pytest.approx(expected[1], rel=0.02)


def test_enable_amp(tmp_path):
    from toy_run import toy_config

    cfg = toy_config(tmp_path)
    wrapper = cfg.optim_wrapper
    enable_amp(cfg)
    assert wrapper.type == "AmpOptimWrapper" and wrapper.optimizer.type == "AdamW"
    enable_amp(cfg)
    wrapper.type = "ApexOptimWrapper"
    with pytest.raises(ConfigError, match=r"--amp .*'OptimWrapper'.*'ApexOptimWrapper'"):
        enable_amp(cfg)


def four_layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in ("backbone", "neck", "offsets", "head")})


def grouped(model: nn.ModuleDict, kind: type) -> BaseOptimWrapper:
    """Return a wrapper whose optimizer has a group for each parameter, as mmengine makes them for paramwise_cfg."""
    rates = {"backbone": 0.01, "offsets": 0.01}
    groups = [
        {"params": [parameter], **({"lr": rates[name]} if name in rates else {})}
        for name, layer in model.items()
        for parameter in layer.parameters()
    ]
    return kind(torch.optim.AdamW(groups, lr=0.1), clip_grad={"max_norm": 1.0})


def updated(
    model: nn.ModuleDict, wrapper: BaseOptimWrapper, schedule: MultiStepLR, count: int
) -> list[torch.Tensor]:
    for step in range(count):
        x = torch.full((2, 3), 1.0 + step)
        for layer in model.values():
            x = layer(x)
        wrapper.update_params(x.square().mean())
        schedule.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_groups_with_the_same_options_are_one():
    models = four_layers(), four_layers()
    ours, theirs = (
        grouped(model, kind) for model, kind in zip(models, (OptimWrapper, MMEngineOptimWrapper), strict=True)
    )
    groups = ours.optimizer.param_groups
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.01, 4), (0.1, 4)]
    assert len(theirs.optimizer.param_groups) == 8
    found, expected = (
        updated(model, wrapper, MultiStepLR(wrapper, milestones=[2]), 4)
        for model, wrapper in zip(models, (ours, theirs), strict=True)
    )
    assert_close(found, expected)
    assert groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("kind", [OptimWrapper, MMEngineOptimWrapper])
def test_a_run_whose_parameters_had_a_group_each_goes_on_as_it_would_have(kind):
    model = four_layers()
    wrapper = grouped(model, kind)
    schedule = MultiStepLR(wrapper, milestones=[2, 5])
    updated(model, wrapper, schedule, 3)
    saved = copy.deepcopy((model.state_dict(), wrapper.state_dict(), schedule.state_dict()))
    expected = updated(model, wrapper, schedule, 4)

    other = four_layers()
    resumed = grouped(other, OptimWrapper)
    its_schedule = MultiStepLR(resumed, milestones=[2, 5])
    for part, state in zip((other, resumed, its_schedule), saved, strict=True):
        part.load_state_dict(state)
    assert_close(updated(other, resumed, its_schedule, 4), expected)
    assert len(resumed.optimizer.param_groups) == {OptimWrapper: 2, MMEngineOptimWrapper: 8}[kind]
    assert its_schedule.get_last_value()[0] == pytest.approx(0.0001)


def test_a_key_that_no_parameter_has_is_told(logged):
    said = logged(options, "warn")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    options.check_custom_keys({"0.bias": {}, "backbone": {}}, model, torch.optim.SGD(model.parameters()))
    [text] = said
    assert "custom_keys.backbone acts on nothing" in text and "parts of the model are 0" in text
