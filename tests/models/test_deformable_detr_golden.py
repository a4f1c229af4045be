"""Deformable DETR against a peer's numbers: outputs, predictions, losses and gradients."""

import json

import pytest
import torch
from golden import golden, under
from mmengine.structures import InstanceData

from visdet.registry import MODELS
from visdet.structures import DetDataSample

VARIANTS = ("base", "refine", "two_stage")


def close(actual, expected, tolerance=1e-4):
    """Compare relative to the largest magnitude, infinities by place and sign."""
    actual, expected = torch.as_tensor(actual).detach(), torch.as_tensor(expected)
    assert actual.shape == expected.shape
    assert torch.equal(actual.isinf(), expected.isinf())
    actual, expected = actual[actual.isfinite()], expected[expected.isfinite()]
    if len(expected):
        scale = max(1.0, float(expected.abs().max()))
        assert float((actual - expected).abs().max()) <= tolerance * scale


class Case:
    """A model with the peer's weights, its inputs, and what the peer computed."""

    def __init__(self, variant):
        arrays = golden(f"deformable_detr_{variant}")
        self.arrays = arrays
        config = {
            "type": "DeformableDETR",
            **json.loads(str(arrays["config"])),
            "data_preprocessor": {"type": "DetDataPreprocessor"},
        }
        self.model = MODELS.build(config).eval()
        self.model.load_state_dict(under(arrays, "state"), strict=True)
        self.images = torch.from_numpy(arrays["input/images"])
        self.output = under(arrays, "output")

    def samples(self, scale_factor=False, padded=True):
        samples = []
        for i in range(2):
            sample = DetDataSample()
            height, width = self.arrays["input/img_shape"][i].tolist() if padded else (96, 128)
            sample.set_metainfo({"img_shape": (height, width), "batch_input_shape": (96, 128)})
            if scale_factor:
                sample.set_metainfo({"scale_factor": tuple(self.arrays["input/scale_factor"][i].tolist())})
            sample.gt_instances = InstanceData(
                bboxes=torch.from_numpy(self.arrays[f"input/gt_bboxes/{i}"]),
                labels=torch.from_numpy(self.arrays[f"input/gt_labels/{i}"]),
            )
            samples.append(sample)
        return samples


@pytest.fixture(scope="module", params=VARIANTS)
def case(request):
    return Case(request.param)


def test_stages_of_the_walk(case):
    seen = {}
    model = case.model

    def keep(name):
        return lambda module, args, out: seen.update({name: (args, out)})

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_children()]
    with torch.no_grad():
        model(case.images, case.samples(), mode="tensor")
    for handle in handles:
        handle.remove()

    for level, out in enumerate(seen["backbone"][1]):
        close(out, case.output[f"backbone/{level}"])
    for level, out in enumerate(seen["neck"][1]):
        close(out, case.output[f"neck/{level}"])
    pyramid = seen["encoder"][0][0]
    close(pyramid.positions, case.output["pre_transformer/feat_pos"])
    assert torch.equal(pyramid.padding_mask, case.output["pre_transformer/feat_mask"])
    assert torch.equal(pyramid.level_shapes, case.output["pre_transformer/spatial_shapes"])
    close(pyramid.valid_ratios, case.output["pre_transformer/valid_ratios"])
    close(seen["encoder"][1], case.output["memory"])
    (query, query_pos, _, reference, _), (hidden_states, references) = seen["decoder"]
    close(query, case.output["decoder/query"])
    close(query_pos, case.output["decoder/query_pos"])
    close(reference, case.output["decoder/initial_reference"])
    close(hidden_states, case.output["decoder/hidden_states"])
    for index, reference in enumerate(references):
        close(reference, case.output[f"decoder/references/{index}"])
    if "two_stage/enc_cls" in case.output:
        close(seen["memory_trans_norm"][1], case.output["two_stage/output_memory"])


def test_first_stage_proposals():
    case = Case("two_stage")
    from visdet.models.deformable_detr.flat_pyramid import flatten_pyramid
    from visdet.models.deformable_detr.proposals import pixel_proposals

    model = (
        case.model.train()
    )  # the proposals of all pixels are there in training alone; batch norm is in eval mode
    with torch.no_grad():
        sizes = [tuple(size) for size in case.arrays["input/img_shape"].tolist()]
        features = model.extract_feat(case.images)
        pyramid = flatten_pyramid(features, sizes, (96, 128), model.positional_encoding, model.level_embed)
        start = model.proposals(model.encoder(pyramid), pyramid)
    close(pixel_proposals(pyramid)[0], case.output["two_stage/proposals_unact"])
    close(start.encoder_logits, case.output["two_stage/enc_cls"])
    best = start.encoder_logits[..., 0].topk(20, dim=1).indices
    assert torch.equal(best, case.output["two_stage/topk_indices"])
    close(start.references, case.output["decoder/initial_reference"])


@torch.no_grad()
def test_raw_outputs(case):
    logits, boxes = case.model(case.images, case.samples(), mode="tensor")
    close(logits, case.output["head/cls_logits"])
    close(boxes, case.output["head/boxes_cxcywh"])


@torch.no_grad()
@pytest.mark.parametrize("samples_given", [True, False])
def test_raw_outputs_without_padding(case, samples_given):
    samples = case.samples(padded=False) if samples_given else None
    logits, boxes = case.model(case.images, samples, mode="tensor")
    close(logits, case.output["no_padding/cls_logits"])
    close(boxes, case.output["no_padding/boxes_cxcywh"])


@torch.no_grad()
@pytest.mark.parametrize("name", ["predictions", "predictions_rescaled"])
def test_predictions(case, name):
    samples = case.model(case.images, case.samples(scale_factor=name.endswith("rescaled")), mode="predict")
    for i, sample in enumerate(samples):
        predicted = sample.pred_instances
        close(predicted.bboxes, case.output[f"{name}/{i}/bboxes"])
        close(predicted.scores, case.output[f"{name}/{i}/scores"])
        assert torch.equal(predicted.labels, case.output[f"{name}/{i}/labels"])


def test_losses_and_gradients(case):
    model = case.model.train()
    model.zero_grad()
    losses = model(case.images, case.samples(), mode="loss")
    expected = under(case.arrays, "loss")
    total = sum(losses.values())
    assert set(losses) == set(expected) - {"total"}
    for name, loss in losses.items():
        close(loss, expected[name])
    close(total, expected["total"])

    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.eval()
    norms = under(case.arrays, "grad_norm")
    assert {name for name, gradient in gradients.items() if gradient is not None} == set(norms)
    for name, norm in norms.items():
        assert float(gradients[name].norm()) == pytest.approx(float(norm), rel=1e-4, abs=1e-6), name
    for name, gradient in under(case.arrays, "grad").items():
        difference = (gradients[name] - gradient).norm() / gradient.norm()
        assert float(difference) <= 1e-4, name
