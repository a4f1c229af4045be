"""Deformable DETR and DINO against a peer's numbers: outputs, predictions, losses and gradients."""

import json

import pytest
import torch
from golden import available, every, golden, golden_state, sampled, under
from mmengine.structures import InstanceData

from visdet.registry import MODELS
from visdet.structures import DetDataSample

VARIANTS = available(
    *(f"deformable_detr_{kind}{name}" for kind in ("small_", "") for name in ("base", "refine", "two_stage")),
    "dino_small",
)
DETR_VARIANTS = [name for name in VARIANTS if name != "dino_small"]


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
        case.close(out, f"backbone/{level}")
    for level, out in enumerate(seen["neck"][1]):
        case.close(out, f"neck/{level}")
    pyramid = seen["encoder"][0][0]
    case.close(pyramid.positions, "pre_transformer/feat_pos")
    case.equal(pyramid.padding_mask, "pre_transformer/feat_mask")
    case.equal(pyramid.level_shapes, "pre_transformer/spatial_shapes")
    case.close(pyramid.valid_ratios, "pre_transformer/valid_ratios")
    case.close(seen["encoder"][1], "memory")
    (query, query_pos, _, reference, _), (hidden_states, references) = seen["decoder"]
    case.close(query, "decoder/query")
    if query_pos is not None:
        case.close(query_pos, "decoder/query_pos")
    case.close(reference, "decoder/initial_reference")
    case.close(hidden_states, "decoder/hidden_states")
    for index, reference in enumerate(references):
        case.close(reference, f"decoder/references/{index}")
    if "two_stage/enc_cls" in case.output and query_pos is not None:
        case.close(seen["memory_trans_norm"][1], "two_stage/output_memory")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.endswith("two_stage")])
def test_first_stage_proposals(variant):
    case = Case(variant)
    from visdet.models.deformable_detr.decoder_start import pixel_proposals
    from visdet.models.deformable_detr.flat_pyramid import flatten_pyramid

    model = (
        case.model.train()
    )  # the proposals of all pixels are there in training alone; batch norm is in eval mode
    with torch.no_grad():
        sizes = torch.from_numpy(case.arrays["input/img_shape"])
        features = model.extract_feat(case.images)
        pyramid = flatten_pyramid(features, sizes, (96, 128), model.positional_encoding, model.level_embed)
        start = model.proposals(model.encoder(pyramid), pyramid)
    case.close(pixel_proposals(pyramid)[0], "two_stage/proposals_unact")
    case.close(start.encoder_logits, "two_stage/enc_cls")
    case.equal(start.encoder_logits[..., 0].topk(20, dim=1).indices, "two_stage/topk_indices")
    case.close(start.references, "decoder/initial_reference")


@torch.no_grad()
def test_raw_outputs(case):
    logits, boxes = case.model(case.images, case.samples(), mode="tensor")
    case.close(logits, "head/cls_logits")
    case.close(boxes, "head/boxes_cxcywh")


@torch.no_grad()
@pytest.mark.parametrize("samples_given", [True, False])
def test_raw_outputs_without_padding(case, samples_given):
    samples = case.samples(padded=False) if samples_given else None
    logits, boxes = case.model(case.images, samples, mode="tensor")
    case.close(logits, "no_padding/cls_logits")
    case.close(boxes, "no_padding/boxes_cxcywh")


@torch.no_grad()
@pytest.mark.parametrize("name", ["predictions", "predictions_rescaled"])
def test_predictions(case, name):
    samples = case.model(case.images, case.samples(scale_factor=name.endswith("rescaled")), mode="predict")
    for i, sample in enumerate(samples):
        predicted = sample.pred_instances
        case.close(predicted.bboxes, f"{name}/{i}/bboxes")
        case.close(predicted.scores, f"{name}/{i}/scores")
        case.equal(predicted.labels, f"{name}/{i}/labels")


@pytest.mark.parametrize("variant", DETR_VARIANTS)
def test_losses_and_gradients(variant):
    case = Case(variant)
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
        key, step = every(name)
        difference = (sampled(gradients[key], step) - gradient).norm() / gradient.norm()
        assert float(difference) <= 1e-4, key
