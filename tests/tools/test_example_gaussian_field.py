"""The example of a Gaussian field: golden vectors of its parameters, and that it learns and tests as it validated."""

import torch
from gaussian_field import LearnableGaussianField, VolumeDataset, make_volume
from golden import golden, under
from toolbox import ROOT, succeed_here

from visdet.engine import read_scalars

CONFIG = ROOT / "examples/gaussian_field/config.py"


def test_golden_vectors():
    arrays = under(golden("gaussian_field"), "cov_tril")
    field = LearnableGaussianField(6).double()
    field.load_state_dict({name: arrays[f"input/{name}"] for name in field.state_dict()})
    points = arrays["input/points"].requires_grad_()
    assert torch.allclose(field.cholesky, arrays["output/cov_chol"], rtol=1e-12)
    output = field(points)
    assert torch.allclose(output, arrays["output/field"], rtol=1e-11)
    output.backward(arrays["input/grad_field"])
    for name, tensor in [("points", points), *field.named_parameters()]:
        assert torch.allclose(tensor.grad, arrays[f"output/field/grad_{name}"], rtol=1e-9, atol=1e-13), name


def test_a_batch_of_voxels_is_looked_up_at_once():
    dataset, volume = VolumeDataset(), torch.from_numpy(make_volume())
    (chunk,) = dataset.__getitems__([0, 49])
    assert torch.allclose(chunk["inputs"] * 4.8, torch.tensor([[0.5, 0.5, 0.5], [0.5, 1.5, 1.5]]))
    expected = volume[0, [0, 1], [0, 1]] / volume.abs().max()
    assert torch.allclose(chunk["data_samples"].gt_field, expected.float())


def test_it_trains_and_tests_as_it_validated(tmp_path, monkeypatch, capsys):
    options = (
        "--cfg-options",
        "model.num_gaussians=50",
        "train_cfg.max_iters=60",
        "train_cfg.val_interval=60",
    )
    succeed_here(monkeypatch, capsys, "train", CONFIG, "--work-dir", tmp_path / "run", *options)
    scalars = read_scalars(str(tmp_path / "run"))
    assert scalars["field/psnr"][60] > 25
    checkpoint = tmp_path / "run" / "iter_60.pth"
    printed = succeed_here(
        monkeypatch, capsys, "test", CONFIG, checkpoint, "--work-dir", tmp_path / "test", *options
    )
    assert f"field/psnr {scalars['field/psnr'][60]:.4f}" in printed
