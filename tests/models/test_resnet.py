"""ResNet: torchvision's names and numbers, freezing, and where pretrained weights come from."""

import copy
from urllib.error import URLError

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close
from torchvision.models.feature_extraction import create_feature_extractor

from visdet.models.backbones import ResNet
from visdet.models.backbones import pretrained as pretrained_page
from visdet.models.layers.frozen_norm import fold_frozen_norms


def tiny(**options):
    torch.manual_seed(0)
    return ResNet(**{"depth": 18, "base_channels": 4, **options})


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_names_and_shapes_are_torchvisions(depth):
    with torch.device("meta"):
        ours = ResNet(depth).state_dict()
        theirs = torchvision.models.get_model(f"resnet{depth}").state_dict()
    expected = {name: value.shape for name, value in theirs.items() if not name.startswith("fc.")}
    assert {name: value.shape for name, value in ours.items()} == expected


@torch.no_grad()
@pytest.mark.parametrize("depth", [18, 50])
def test_features_are_torchvisions(depth):
    theirs = torchvision.models.get_model(f"resnet{depth}").eval()
    ours = ResNet(depth).eval()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    x = torch.randn(1, 3, 64, 96)
    stages = create_feature_extractor(theirs, ["layer1", "layer2", "layer3", "layer4"])(x)
    for out, expected in zip(ours(x), stages.values(), strict=True):
        assert_close(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_caffe_style_strides_in_the_first_convolution():
    two, one = (2, 2), (1, 1)
    for style, strides in {"caffe": [two, one], "pytorch": [one, two]}.items():
        convs = ResNet(50, style=style).layer2[0].main_layers
        assert [conv.stride for conv, _ in convs[:2]] == strides


def test_dilated_last_stage_keeps_the_resolution():
    backbone = tiny(strides=(1, 2, 2, 1), dilations=(1, 1, 1, 2), out_indices=(2, 3))
    assert [tuple(out.shape) for out in backbone(torch.randn(1, 3, 64, 64))] == [(1, 16, 4, 4), (1, 32, 4, 4)]


def test_frozen_stages_neither_learn_nor_count():
    backbone = tiny(frozen_stages=1, norm_eval=False).train()
    before = copy.deepcopy(backbone.state_dict())
    sum(out.sum() for out in backbone(torch.randn(2, 3, 32, 32))).backward()
    for name, parameter in backbone.named_parameters():
        assert (parameter.grad is None) == name.startswith(("conv1", "bn1", "layer1")), name
    for name, value in backbone.state_dict().items():
        if name.endswith("running_mean"):
            assert torch.equal(value, before[name]) == name.startswith(("bn1", "layer1")), name


@pytest.mark.parametrize(
    "options", [{"depth": 50, "frozen_stages": 1}, {"with_cp": True}, {"frozen_stages": 0}]
)
@pytest.mark.parametrize(
    ("device", "tolerance", "dtype"),
    [("cpu", 1e-4, None)]
    + [
        pytest.param("cuda", tolerance, dtype, marks=pytest.mark.cuda)
        for tolerance, dtype in ((1e-2, None), (5e-2, torch.bfloat16))
    ],
)
def test_folded_norms_change_neither_features_nor_gradients(device, tolerance, dtype, options, monkeypatch):
    options = {"norm_cfg": {"type": "BN", "requires_grad": False}, **options}
    folded, separate = (tiny(**options).to(device).train() for _ in range(2))
    with torch.no_grad():
        for norm in (module for module in folded.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_()
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    separate.load_state_dict(folded.state_dict())
    x = torch.randn(2, 3, 64, 96, device=device)
    assert len(fold_frozen_norms([(folded.conv1, folded.bn1)])) == 1
    with torch.autocast(device, dtype, enabled=dtype is not None):
        outs = folded(x)
        monkeypatch.setattr("visdet.models.backbones.resnet.fold_frozen_norms", lambda layers: {})
        expected = separate(x)
    for found, right in ((outs, expected), (_gradients(folded, outs), _gradients(separate, expected))):
        for a, b in zip(found, right, strict=True):
            assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


def _gradients(backbone, outs):
    sum(out.float().square().mean() for out in outs).backward()
    return [parameter.grad for parameter in backbone.parameters() if parameter.requires_grad]


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("base_channels", [2, 4, 12])
def test_widths_that_fill_no_vector_under_autocast(base_channels):
    backbone = tiny(base_channels=base_channels).cuda().eval()
    x = torch.randn(2, 3, 64, 96, device="cuda")
    expected = backbone(x)
    with torch.autocast("cuda", torch.bfloat16):
        found = backbone(x)
    torch.cuda.synchronize()
    for ours, wanted in zip(found, expected, strict=True):
        assert_close(ours.float(), wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())


def test_weights_that_a_hook_makes_are_not_folded():
    backbone = tiny(norm_cfg=dict(type="BN", requires_grad=False)).eval()
    x = torch.randn(1, 3, 32, 32)
    conv = backbone.layer1[0].conv1
    expected = backbone(x)[-1]
    prune.identity(conv, "weight")
    assert_close(backbone(x)[-1], expected)
    with torch.no_grad():
        conv.weight_orig.mul_(3)
        assert not torch.allclose(backbone(x)[-1], expected)
    for _ in range(2):
        backbone.train()(x)[-1].sum().backward()
    assert conv.weight_orig.grad.abs().sum() > 0


def test_norm_without_gradient_and_group_norm_names():
    backbone = tiny(norm_cfg={"type": "BN", "requires_grad": False})
    assert not backbone.layer4[1].bn2.weight.requires_grad
    assert "layer4.1.gn2.weight" in tiny(norm_cfg={"type": "GN", "num_groups": 2}).state_dict()


@pytest.mark.parametrize("norm", ["BN", "SyncBN"])
@pytest.mark.parametrize("norm_eval", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_nothing(norm, norm_eval, dtype, device):
    options = dict(base_channels=16, norm_cfg=dict(type=norm), norm_eval=norm_eval)
    plain, saving = (tiny(**options, with_cp=with_cp).to(device).train() for with_cp in (False, True))
    x = torch.randn(2, 3, 64, 64, device=device)
    for backbone in (plain, saving):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            out = backbone(x)[-1]
        out.float().square().sum().backward()
    tolerance = 1e-6 if device == "cpu" else 1e-3
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= tolerance * (b.grad.norm() + 1e-3)
    assert_close(list(plain.buffers()), list(saving.buffers()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 20}, "depth must be 18 or"),
        ({"num_stages": 5}, "num_stages must be int from 1 to 4"),
        ({"num_stages": 2}, r"out_indices must be stages 0..1, got \(0, 1, 2, 3\)"),
        ({"style": "tensorflow"}, "style must be 'pytorch' or 'caffe'"),
        ({"frozen_stages": 5}, "frozen_stages must be int from -1 to 4, got 5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def from_checkpoint(checkpoint, **options):
    backbone = tiny(init_cfg={"type": "Pretrained", "checkpoint": str(checkpoint), **options})
    backbone.init_weights()
    return backbone


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "meta": {}}])
def test_weights_from_a_file(tmp_path, wrap):
    source = tiny()
    nn.init.normal_(source.layer4[1].bn2.weight)
    contents = {**source.state_dict(), "fc.weight": torch.zeros(2, 32), "fc.bias": torch.zeros(2)}
    torch.save(wrap(contents), tmp_path / "weights.pth")
    loaded = from_checkpoint(tmp_path / "weights.pth")
    assert_close(loaded.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_weights_under_a_prefix(tmp_path):
    source = {f"backbone.{name}": value for name, value in tiny().state_dict().items()}
    torch.save({**source, "neck.weight": torch.zeros(1)}, tmp_path / "detector.pth")
    loaded = from_checkpoint(tmp_path / "detector.pth", prefix="backbone")
    assert torch.equal(loaded.conv1.weight, source["backbone.conv1.weight"])


def test_missing_file_is_an_error_unless_random_weights_are_allowed(tmp_path, logged):
    with pytest.raises(RuntimeError, match=r"nowhere.pth.*if_unavailable='random'"):
        from_checkpoint(tmp_path / "nowhere.pth")
    said = logged(pretrained_page)
    from_checkpoint(tmp_path / "nowhere.pth", if_unavailable="random")
    assert "STARTS FROM RANDOM WEIGHTS" in said[0]
    assert "nowhere.pth" in said[0]


def test_weights_from_torchvision_and_without_a_network(monkeypatch):
    asked = []

    def download(self, **options):
        asked.append(self.name)
        if len(asked) > 1:
            raise URLError("no network")
        return torchvision.models.resnet18(num_classes=2).state_dict()

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", download)
    backbone = ResNet(18, init_cfg={"type": "Pretrained", "checkpoint": "torchvision://resnet18"})
    backbone.init_weights()
    assert asked == ["IMAGENET1K_V1"]
    with pytest.raises(RuntimeError, match=r"torchvision://resnet18.*no network") as caught:
        backbone.init_weights()
    for part in (
        "https://download.pytorch.org/models/resnet18-f37072fd.pth",
        "checkpoint=PATH",
        "if_unavailable",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [("torchvision://resnet19", "resnet19"), ("torchvision://resnet50.IMAGENET22K", "IMAGENET22K")],
)
def test_unknown_torchvision_weights(checkpoint, message):
    with pytest.raises((ValueError, KeyError), match=message):
        from_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="if_unavailable must be 'error' or 'random', got 'warn'"):
        from_checkpoint(checkpoint, if_unavailable="warn")


def test_weights_of_another_architecture(tmp_path):
    torch.save(tiny(depth=34).state_dict(), tmp_path / "r34.pth")
    with pytest.raises(
        RuntimeError, match=r"r34.pth' do not fit the ResNet of this config: surplus: layer1.2"
    ):
        from_checkpoint(tmp_path / "r34.pth")
    torch.save(tiny(base_channels=8).state_dict(), tmp_path / "wide.pth")
    with pytest.raises(RuntimeError, match=r"other shape: conv1.weight \[8, 3, 7, 7\] for \[4, 3, 7, 7\]"):
        from_checkpoint(tmp_path / "wide.pth")
