"""Models with the weights of other implementations, and what these computed."""

import json

import pytest
import torch
from golden import close, every, golden, golden_state, sampled, under
from mmengine.structures import InstanceData
from training_steps import gradients_of

from visdet.registry import MODELS
from visdet.structures import DetDataSample


class Case:
    """A model with the peer's weights, its inputs, and what the peer computed."""

    def __init__(self, variant):
        arrays = golden(variant)
        self.arrays = arrays
        config = {
            "type": "DeformableDETR",
            **json.loads(str(arrays["config"])),
            "data_preprocessor": {"type": "DetDataPreprocessor"},
        }
        self.model = MODELS.build(config).eval()
        self.model.load_state_dict(golden_state(self.model, arrays), strict=True)
        self.images = torch.from_numpy(arrays["input/images"])
        self.output = {}
        for name, value in under(arrays, "output").items():
            key, step = every(name)
            self.output[key] = (value, step)

    def close(self, actual, key):
        """Compare with what is stored of output ``key``."""
        expected, step = self.output[key]
        close(sampled(torch.as_tensor(actual), step), expected)

    def equal(self, actual, key):
        """Compare with what is stored of output ``key``, exactly."""
        expected, step = self.output[key]
        assert torch.equal(sampled(actual, step), expected)

    def samples(self, scale_factor=False, padded=True):
        arrays = self.arrays
        samples = []
        for i in range(2):
            sample = DetDataSample()
            height, width = arrays["input/img_shape"][i].tolist() if padded else (96, 128)
            sample.set_metainfo({"img_shape": (height, width), "batch_input_shape": (96, 128)})
            if scale_factor:
                sample.set_metainfo({"scale_factor": tuple(arrays["input/scale_factor"][i].tolist())})
            sample.gt_instances = InstanceData(
                bboxes=torch.from_numpy(arrays[f"input/gt_bboxes/{i}"]),
                labels=torch.from_numpy(arrays[f"input/gt_labels/{i}"]),
            )
            samples.append(sample)
        return samples


def assert_norms(gradients, stored, tolerance):
    """Compare the norms of the gradients with those that are stored, within a part in 10,000 or the tolerance."""
    norms = under(stored, "grad_norm")
    assert set(gradients) == set(norms)
    for name, norm in norms.items():
        assert float(gradients[name].norm()) == pytest.approx(float(norm), rel=1e-4, abs=tolerance), name


def assert_losses_and_gradients(model, images, samples, stored):
    """Compare the losses of a training step and their gradients with those that are stored."""
    model.train().zero_grad()
    losses = model(images, samples, mode="loss")
    total = sum(losses.values())
    expected = under(stored, "loss")
    assert set(losses) == set(expected) - {"total"}
    for name, loss in expected.items():
        close((losses | {"total": total})[name], loss)

    total.backward()
    gradients = gradients_of(model)
    model.eval()
    assert_norms(gradients, stored, 1e-5)
    for name, gradient in under(stored, "grad").items():
        key, step = every(name)
        difference = (sampled(gradients[key], step) - gradient).norm()
        assert float(difference) <= 1e-4 * max(1e-3, float(gradient.norm())), key
