"""The second stage with frozen perception: motion and planning learn, everything below stays as it was."""

import copy

import numpy as np
import pytest
import torch
from tiny_driving import motion_frame, tiny_config, tiny_stage2
from torch.testing import assert_close
from training_steps import backward, without_gradient

from visdet.engine.stages import StagedModel
from visdet.registry import MODELS


def test_only_motion_and_planning_learn():
    model = tiny_stage2().train()
    before = copy.deepcopy(model.state_dict())
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    staged = StagedModel(model)
    for time in (0.0, 0.5, 1.0):
        losses = staged.losses(*motion_frame([time, time]))
        assert all(name.startswith(("motion_loss", "planning_loss")) for name in losses)
        optimizer.zero_grad()
        backward(losses)
        assert not learning & without_gradient(model)
        optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("head.motion_plan_head.") for name in changed)
    assert learning <= changed
    assert model.training and not model.img_backbone.training and model.head.motion_plan_head.training


def test_motion_learns_from_the_same_instances_as_with_all_losses():
    frozen, whole = tiny_stage2().train(), tiny_stage2(freeze_perception=False)
    whole.load_state_dict(frozen.state_dict())
    whole.train()
    for part in (whole.img_backbone, whole.img_neck, whole.head.det_head, whole.head.map_head):
        part.eval()  # statistics as learned, and no denoising
    staged = [StagedModel(model) for model in (frozen, whole)]
    for time in (0.0, 0.5):
        losses = [one.losses(*motion_frame([time, time])) for one in staged]
        for name, value in losses[0].items():
            assert_close(value, losses[1][name])
    assert len(losses[1]) > len(losses[0])


def test_a_plan_is_what_differs_from_going_on():
    model = tiny_stage2().eval()
    branch = model.head.motion_plan_head.layers[-1].plan_reg_branch[-1]
    with torch.no_grad():
        branch.weight.zero_(), branch.bias.fill_(0.25)
    staged = StagedModel(model)
    for time, ahead in ((0.0, 0.0), (0.5, 3.0), (1.0, 8.0)):
        pose = np.eye(4)
        pose[1, 3] = ahead
        with torch.no_grad():
            (result,) = staged.predictions(*motion_frame([time], poses=[pose]))
    steps = result.pred_plan.final_planning.diff(dim=0, prepend=torch.zeros(1, 2))
    # 5 m in the last 0.5 s go on, and 0.25 m a step are predicted on top.
    assert_close(steps, torch.tensor([0.25, 5.25]).expand(6, 2), atol=1e-4, rtol=0)


def test_frozen_perception_needs_motion():
    with pytest.raises(ValueError, match="freeze_perception needs with_motion_plan"):
        MODELS.build(tiny_config(freeze_perception=True))


@pytest.mark.parametrize(
    "name", ["gt_ego_fut_cmd", "gt_ego_fut_trajs", "gt_ego_fut_masks", "ego_status", "gt_labels_3d"]
)
def test_a_sample_without_what_the_planner_needs_is_refused(name):
    images, samples = motion_frame([0.0, 0.0])
    for sample in samples:
        delattr(sample, name)
    model = tiny_stage2()
    with pytest.raises(ValueError, match=f"data_samples must have {name}, which the model needs"):
        model.train()(images, samples, mode="loss")
    if name == "gt_ego_fut_cmd":
        with pytest.raises(ValueError, match=f"data_samples must have {name}, which the model needs"):
            model.eval()(images, samples, mode="predict")


@pytest.mark.parametrize("quantile", [0.5, 2])
def test_a_threshold_of_boxes_is_that_of_their_motion(quantile):
    scores = tiny_stage2().eval()(*motion_frame([0.0]), mode="predict")[0].pred_instances_3d.cls_scores
    threshold = float(scores.quantile(quantile)) if quantile < 1 else 2.0  # above all scores

    def limit(head):
        head.det_head.decoder.score_threshold = threshold

    (sample,) = tiny_stage2(limit).eval()(*motion_frame([0.0]), mode="predict")
    found = sample.pred_instances_3d
    assert len(found.boxes_3d) == len(found.trajs_3d) == (scores >= threshold).sum() < len(scores)


def test_motion_starts_from_trajectories_of_each_class():
    def drop_a_class(head):
        head.motion_plan_head.update(num_classes=4, motion_anchor=head.motion_plan_head.motion_anchor[:4])

    message = r"motion_anchor of motion_plan_head must have the 5 classes of det_head, got 4"
    with pytest.raises(ValueError, match=message):
        tiny_stage2(drop_a_class)
