"""Deformable DETR and DINO against a peer's numbers: outputs, predictions, losses and gradients."""

import pytest
import torch
from detr_golden import Case, assert_losses_and_gradients
from golden import available

VARIANTS = available(
    *(f"deformable_detr_{kind}{name}" for kind in ("small_", "") for name in ("base", "refine", "two_stage")),
    "dino_small",
)
DETR_VARIANTS = [name for name in VARIANTS if name != "dino_small"]


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
    assert_losses_and_gradients(case.model, case.images, case.samples(), case.arrays)
