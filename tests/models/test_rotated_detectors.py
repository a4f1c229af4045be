"""Detectors of rotated boxes: the coder, the attention that turns, losses, costs and training steps."""

import math

import pytest
import torch
from from_host import copies_of_losses
from mmengine.optim import OptimWrapper
from tiny_detr import BATCH, VARIANTS, batch, batches, config, started, train, train_by_graphs
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close
from training_steps import backward, without_gradient

from visdet.engine import AmpOptimWrapper
from visdet.models import RotatedBoxCoder, UprightBoxCoder
from visdet.models.boxes import cxcywh_to_xyxy
from visdet.models.layers import MultiScaleDeformableAttention
from visdet.models.matching import PaddedTargets
from visdet.registry import MODELS, TASK_UTILS
from visdet.structures.rotated_boxes import boxes_to_polygons

WHWH = torch.tensor([[[96.0, 64.0, 96.0, 64.0]]])
TURNED_WHWH = WHWH.roll(1, -1)
CODER = RotatedBoxCoder()
LOSSES = {
    "l1": {"type": "RotatedL1Loss"},
    "kld": {"type": "GDLoss", "loss_type": "kld"},
    "probiou": {"type": "GDLoss", "loss_type": "probiou"},
    "iou": {"type": "RotatedIoULoss"},
}


def drawn(*shape):
    """Return boxes within the image of WHWH, none of which is a square."""
    center, sides, angle = torch.rand(*shape, 2), 4 + 6 * torch.rand(*shape, 2), torch.rand(*shape, 1)
    sides = sides * torch.tensor([2.0, 1.0])
    return torch.cat((20 + 20 * center, sides, (angle - 0.5) * math.pi), -1)


def turned_right(boxes):
    """Return the boxes of an image after a quarter turn clockwise on the screen, which makes it 64 x 96."""
    x, y, w, h, angle = boxes.unbind(-1)
    return torch.stack((64 - y, x, w, h, angle + math.pi / 2), -1)


def loss_of(name, pred, target, whwh=WHWH, **options):
    loss, shape = MODELS.build({**LOSSES[name], **options}), target.shape[:-1]
    if not loss.is_in_pixels:
        pred, target = CODER.to_unit(pred, whwh), CODER.to_unit(target, whwh)
    elements = loss(pred, target, reduction_override="none")
    return elements if loss.is_in_pixels else elements.sum(-1).view(shape)


def test_the_coder_round_trips():
    boxes = drawn(2, 7)
    unit = CODER.to_unit(boxes, WHWH)
    assert ((unit[..., :4] > 0) & (unit[..., :4] < 1)).all()
    assert_close(CODER.to_pixels(unit, WHWH), boxes)
    assert_close(CODER.decoded(CODER.encoded(unit, torch.logit)), unit)
    still = torch.zeros(2, 7, 5)
    assert_close(CODER.refined(still, unit, torch.logit), unit)
    assert_close(CODER.jittered(boxes, still, WHWH), unit)


@pytest.mark.parametrize("version, low, high", [("le90", -2, 2), ("le135", -1, 3), ("oc", 0, 2)])
def test_predictions_are_boxes_of_the_original_image(version, low, high):
    boxes = drawn(1, 50)
    boxes[..., 4] *= 9
    found = RotatedBoxCoder(version).detected(CODER.to_unit(boxes, WHWH), WHWH, torch.full((1, 1, 4), 0.5))
    corners, expected = boxes_to_polygons(found), 2 * boxes_to_polygons(boxes)
    distances = (corners.unsqueeze(-2) - expected.unsqueeze(-3)).norm(dim=-1)
    assert distances.amin(-1).max() < 1e-3
    assert ((found[..., 4] >= low * math.pi / 4) & (found[..., 4] <= high * math.pi / 4)).all()
    assert version == "oc" or (found[..., 2] >= found[..., 3]).all()


def test_denoising_moves_sides_in_the_direction_of_the_box():
    boxes, shift = drawn(1, 9), torch.rand(1, 9, 5) - 0.5
    shift[..., 4] = 0
    upright = torch.cat((boxes[..., :4], torch.zeros(1, 9, 1)), -1)
    coder = UprightBoxCoder()
    expected = coder.jittered(cxcywh_to_xyxy(boxes[..., :4]), shift[..., :4], WHWH)  # none leaves the image
    moved = CODER.to_pixels(CODER.jittered(upright, shift, WHWH), WHWH)
    assert_close(cxcywh_to_xyxy(moved[..., :4]), coder.to_pixels(expected, WHWH))
    right = CODER.jittered(turned_right(boxes), shift, TURNED_WHWH)
    as_before = turned_right(CODER.to_pixels(CODER.jittered(boxes, shift, WHWH), WHWH))
    assert_close(CODER.to_pixels(right, TURNED_WHWH), as_before)
    shift[..., 4] = 0.5
    more = CODER.jittered(boxes, shift, WHWH)[..., 4] - boxes[..., 4]
    assert_close(more, torch.full_like(more, math.pi / 8))


def test_attention_turns_with_its_reference():
    """A quarter turn of the maps and the references leaves the result, and an angle of 0 is an upright box."""
    attention = MultiScaleDeformableAttention(12, 3, 2, [2, 3], dropout=0.0, batch_first=True).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    shapes = torch.tensor([[10, 15], [4, 6]])
    maps, query = [torch.randn(1, 12, *shape) for shape in shapes.tolist()], torch.randn(1, 6, 12)

    def attended(maps, boxes):
        flat = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)
        sizes = torch.tensor([level.shape[-2:] for level in maps])
        return attention(
            query,
            value=flat,
            reference_points=boxes.unsqueeze(2).expand(-1, -1, 2, -1),
            spatial_shapes=sizes,
        )

    boxes = CODER.to_unit(drawn(1, 6), WHWH)
    right = CODER.to_unit(turned_right(CODER.to_pixels(boxes, WHWH)), TURNED_WHWH)
    found = attended([level.rot90(-1, (2, 3)) for level in maps], right)
    assert_close(found, attended(maps, boxes))
    boxes[..., 4] = 0
    upright = UprightBoxCoder().to_unit(cxcywh_to_xyxy(CODER.to_pixels(boxes, WHWH)[..., :4]), WHWH)
    assert_close(attended(maps, boxes), attended(maps, upright))


def test_gaussian_distances_by_matrices():
    pred, target = drawn(8).double(), drawn(8).double()

    def spread(
        boxes,
    ):  # The squares of the distances of the four corners from the middle add up to those of the sides.
        corners = boxes_to_polygons(boxes) - boxes[:, None, :2]
        return corners.mT @ corners

    p, q = (MultivariateNormal(boxes[:, :2], spread(boxes) / 4) for boxes in (pred, target))
    expected = 1 - 1 / (1 + kl_divergence(q, p).log1p())
    assert_close(loss_of("kld", pred, target), expected)
    one, other, shift = spread(pred) / 12, spread(target) / 12, (pred - target)[:, :2]
    middle = (one + other) / 2
    distance = (shift * torch.linalg.solve(middle, shift)).sum(-1) / 8
    distance += (middle.logdet() - (one.logdet() + other.logdet()) / 2) / 2
    assert_close(loss_of("probiou", pred, target), (1 - (-distance).exp()).sqrt())


for_each_loss = pytest.mark.parametrize("name", LOSSES)
for_each_loss_of_boxes = pytest.mark.parametrize("loss_iou", ["kld", "probiou", "iou"])


@for_each_loss
def test_losses_know_the_better_box(name):
    target = torch.tensor([48.0, 32.0, 24.0, 8.0, 0.4])
    for number, steps in enumerate([(2, 6, 11), (2, 5, 6), (3, 7, 11), (2, 3, 5), (0.1, 0.4, 0.7)]):
        pred = target.repeat(4, 1)
        pred[1:, number] += torch.tensor(steps)
        losses = loss_of(name, pred, target.expand_as(pred))
        assert (losses.diff() > 0).all(), (number, losses)
    assert losses[0] < 2e-3
    turned = torch.tensor([[48.0, 32.0, 24.0, 8.0, 0.4 - math.pi]])
    assert loss_of(name, turned, target.expand_as(turned)) < 2e-3


@for_each_loss
def test_sides_swap_if_asked(name):
    target = torch.tensor([[48.0, 32.0, 24.0, 8.0, 0.4]])
    swapped = torch.tensor([[48.0, 32.0, 8.0, 24.0, 0.4 + math.pi / 2]])
    if name == "l1":
        assert loss_of(name, swapped, target) > 0.4
    assert loss_of(name, swapped, target, **({"swaps_sides": True} if name == "l1" else {})) < 2e-3


@for_each_loss
def test_a_quarter_turn_of_everything_changes_no_loss(name):
    pred, target = drawn(1, 20), drawn(1, 20)
    expected = loss_of(name, pred, target)
    right = loss_of(name, turned_right(pred), turned_right(target), TURNED_WHWH)
    if name == "l1":  # sin and cos of twice the angle change their signs only
        expected, right = expected.sum(), right.sum()
    assert_close(right, expected)


@for_each_loss
def test_gradients_are_finite(name):
    square, thin = [9.0, 9.0, 4.0, 4.0], [9.0, 9.0, 40.0, 0.0]
    borders = [-math.pi / 2, -math.pi / 4, 0.0, math.pi / 2, 3 * math.pi / 4]
    kinds = [[*sides, angle] for sides in (square, thin, [9.0, 9.0, 0.0, 0.0]) for angle in borders]
    boxes = torch.tensor([*kinds, [500.0, 0.0, 1.0, 90.0, 0.0]])
    pred = boxes.unsqueeze(1).repeat(1, len(boxes), 1).requires_grad_()
    loss = loss_of(name, pred, boxes.expand_as(pred))
    loss.sum().backward()
    assert loss.isfinite().all() and pred.grad.isfinite().all()


def targets_of(boxes):
    labels = torch.zeros(boxes.shape[:2], dtype=torch.int64)
    return PaddedTargets(boxes_px=boxes, labels=labels, image_whwh=WHWH, counts=[boxes.shape[1]])


@for_each_loss
def test_costs_are_the_losses_of_pairs(name):
    pred, true = drawn(3, 1, 6), drawn(1, 4)
    cost = TASK_UTILS.build({"type": "RotatedBoxCost", "loss": LOSSES[name], "weight": 2.0})
    found = cost.pairwise(torch.zeros(3, 1, 6, 2), pred, targets_of(true))
    assert found.shape == (3, 1, 6, 4)
    assert_close(found[2, 0, 5, 3], 2 * loss_of(name, pred[2, :, 5], true[:, 3])[0])


ROTATED = {
    "box_coder": {"type": "RotatedBoxCoder"},
    "train_cfg": {
        "assigner": {
            "type": "HungarianAssigner",
            "match_costs": [
                {"type": "FocalLossCost", "weight": 2.0},
                {"type": "RotatedBoxCost", "loss": LOSSES["l1"], "weight": 5.0},
                {"type": "RotatedBoxCost", "loss": LOSSES["kld"], "weight": 2.0},
            ],
        }
    },
}


def rotated(variant, loss_iou="kld", **changes):
    options = {**VARIANTS[variant], **ROTATED}
    head = {"type": "DeformableDETRHead", "num_classes": 3, **options.pop("bbox_head", {})}
    head |= {"loss_bbox": LOSSES["l1"], "loss_iou": LOSSES[loss_iou]}
    return config(**{**options, "bbox_head": head, **changes})


def build(variant, **options):
    return started(rotated(variant, **options))


def rotated_batch(counts, sizes=(BATCH, BATCH)):
    images, samples = batch(counts, sizes)
    for sample in samples:
        sample.gt_instances.bboxes = drawn(len(sample.gt_instances))
    return images, samples


@for_each_loss_of_boxes
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_reaches_every_parameter(variant, loss_iou):
    model = build(variant, loss_iou=loss_iou)
    images, samples = rotated_batch((3, 0), sizes=(BATCH, (50, 80)))
    losses = model(images, samples, mode="loss")
    backward(losses)
    assert all("backbone" in name for name in without_gradient(model))
    found = model.eval()(images, samples, mode="predict")[1].pred_instances
    boxes = found.bboxes
    angles = boxes[:, 4]
    assert boxes.shape == (5, 5) and boxes.isfinite().all()
    assert ((angles >= -math.pi / 2) & (angles < math.pi / 2)).all()


@for_each_loss_of_boxes
def test_nothing_in_a_step_comes_from_the_host(loss_iou):
    assert not copies_of_losses(build("dino", loss_iou=loss_iou), *rotated_batch((3, 2)))


@pytest.mark.cuda
@for_each_loss_of_boxes
@pytest.mark.parametrize(("wrapper", "tolerance"), [(OptimWrapper, 1e-3), (AmpOptimWrapper, 3e-2)])
def test_replayed_steps_are_eager_steps(loss_iou, wrapper, tolerance):
    data = batches()
    for sample in (sample for one in data for sample in one["data_samples"]):
        sample.gt_instances.bboxes = drawn(len(sample.gt_instances)).cuda()
    eager, graphed = (build("dino", loss_iou=loss_iou).cuda() for _ in range(2))
    expected = train(eager, wrapper, data=data)
    losses = train_by_graphs(graphed, wrapper, data=data)
    assert_close(losses[:4], expected[:4], rtol=tolerance, atol=tolerance)
    later = 8 * tolerance  # Steps that learn carry on what was rounded in another way.
    assert_close(losses, expected, rtol=later, atol=later)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(box_coder={"type": "RotatedBoxCoder"}), "boxes of 5 numbers, .*got L1Loss, which is of 4"),
        ({**rotated("base"), "box_coder": None}, "boxes of 4 numbers, .*got RotatedL1Loss"),
        (rotated("base", train_cfg=config()["train_cfg"]), "got BBoxL1Cost, which is of 4"),
        (rotated("base", box_coder={"type": "RotatedBoxCoder", "angle_version": "le180"}), "angle_version"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        MODELS.build(given)


def test_upright_targets_are_refused():
    with pytest.raises(ValueError, match=r"bboxes \[N, 5\] and labels \[N\], got \(3, 4\)"):
        build("base")(*batch(), mode="loss")
