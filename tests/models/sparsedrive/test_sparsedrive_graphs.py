"""SparseDrive by CUDA graphs: the numbers of eager steps along a sequence, and nothing in them that needs the host."""

import functools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from from_host import copies_of_losses
from mmengine.optim import OptimWrapper
from numpy.testing import assert_allclose
from tiny_driving import frame, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from visdet.engine import AmpOptimWrapper
from visdet.engine.graphs.half_leaves import CastsNoted, HalfLeaves
from visdet.engine.graphs.leaves import leaves_in_place_of, with_leaves
from visdet.engine.graphs.methods import GraphedLoss, GraphedPrediction
from visdet.engine.stages import StagedModel
from visdet.execution.later_gradients import LaterGradients
from visdet.execution.tensor_tree import NotOnDevice, layout_of, map_tensors
from visdet.structures.driving_data_sample import predictions_of

# Two sequences side by side; the second one's scene ends within.
SCENES = [["a", "b"]] * 6 + [["a", "c"]] * 6


def frames(device, num_boxes=(3, 2)):
    found = []
    for index, scenes in enumerate(SCENES):
        images, samples = frame([0.5 * index] * 2, seed=10 * index, scenes=scenes, num_boxes=num_boxes)
        found.append((images.to(device), [sample.to(device) for sample in samples]))
    return found


def fake(tree, fakes):
    return map_tensors(fakes.from_tensor, tree)


@pytest.mark.parametrize("known", [0, 1])
def test_nothing_in_a_prediction_needs_the_host(known):
    """Numbers of fake tensors do not exist, so that whatever asks for one fails, as a capture would."""
    model = tiny_model().eval()
    sequence = frames("cpu")
    with torch.no_grad():
        staged = StagedModel(model)
        for images, samples in sequence[: known + 1]:
            staged.predictions(images, samples)
        batch = model.prediction_batch(*sequence[known + 1], staged.state)
        expected = model.detections(batch)
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            found = model.detections(fake(batch, fakes))
    assert layout_of(found) == layout_of(expected)


def test_nothing_in_a_step_comes_from_the_host():
    model = tiny_model()
    staged = StagedModel(model)
    staged.losses(*frame([0.0, 0.0], scenes=["a", "b"]))
    assert not copies_of_losses(model, *frame([0.5, 0.5], scenes=["a", "b"]), staged.state)


def test_nothing_in_a_training_step_but_the_assignment_needs_the_host():
    model = tiny_model()
    sequence = frames("cpu")
    staged = StagedModel(model)
    for images, samples in sequence[:2]:
        staged.losses(images, samples)
    batch = model.training_batch(*sequence[2], staged.state)
    predictions, outputs = model.predictions_and_costs(batch)
    targets = model.assign(outputs, batch)
    expected = model.losses(predictions, batch, targets)
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        fake_batch = fake(batch, fakes)
        fake_predictions, fake_outputs = model.predictions_and_costs(fake_batch)
        found = model.losses(fake_predictions, fake_batch, fake(targets, fakes))
    assert list(found) == list(expected)
    assert layout_of(fake_outputs[1]) == layout_of(outputs[1])


def test_gradients_computed_beside_a_backward_pass_are_those_of_autograd():
    model = tiny_model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    results = []
    for later in (None, LaterGradients(parameters, [])):
        torch.manual_seed(0)
        staged = StagedModel(model)
        staged.losses(*frame([0.0, 0.0], scenes=["a", "b"]))
        with nullcontext() if later is None else later.taking():
            losses = staged.losses(*frame([0.5, 0.5], scenes=["a", "b"]))
            found = torch.autograd.grad(sum(losses.values()), parameters, allow_unused=True)
        sums = [
            torch.zeros_like(parameter) if one is None else one.clone()
            for parameter, one in zip(parameters, found, strict=True)
        ]
        results.append((losses, sums))
    later.join()
    assert sum(one is None for one in found) > len(parameters) // 2
    for pairs in later.rounds(list(zip(parameters, sums, strict=True))):
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    assert_close(losses, results[0][0], rtol=0, atol=0)
    for expected, sum_ in zip(results[0][1], sums, strict=True):
        assert_close(sum_, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + 1e-12)


def train(model, wrapper, graphs=None):
    """Return the losses of all steps, the last step's gradient, and the state; the weights stay as they are.

    Sums of a backward on a GPU have no fixed order, so that two eager runs that learn drift apart, too.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    gradients = []
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: gradients.append(
            [p.grad.clone() for p in model.parameters() if p.grad is not None]
        )
    )
    wrapper = wrapper(optimizer=optimizer, clip_grad={"max_norm": 25.0})
    torch.manual_seed(5)
    staged = StagedModel(model, graphs and {"loss": graphs})

    def step(images, samples):
        with wrapper.optim_context(model):
            losses = staged.losses(images, samples)
        wrapper.update_params(sum(losses.values()))
        return torch.stack([loss.detach() for loss in losses.values()])  # no graph outlives its step

    found = [step(*data) for data in frames("cuda")]
    return torch.stack(found), torch.cat([grad.flatten() for grad in gradients[-1]]), staged.state


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-4), ("bfloat16", 6e-3)])
def test_training_by_graphs_gives_the_losses_and_gradients_of_eager_steps(dtype, tolerance):
    """Eager steps round the gradients of parameters to bfloat16."""
    wrapper = OptimWrapper if dtype is None else functools.partial(AmpOptimWrapper, dtype=dtype)
    losses, gradient, state = train(tiny_model().cuda(), wrapper)
    model = tiny_model().cuda()
    said = []
    graphs = GraphedLoss(model, say=said.append)
    graphed_losses, graphed_gradient, graphed_state = train(model, wrapper, graphs)
    # Without history, with it, and where one of the two sequences starts anew.
    assert graphs.counts == {"of a new shape": 3, "replayed": len(SCENES) - 3}, said
    assert_close(graphed_losses, losses, rtol=1e-6, atol=1e-6)
    assert (graphed_gradient - gradient).norm() < tolerance * gradient.norm()
    assert layout_of(graphed_state) == layout_of(state)
    assert graphed_state.clock.timestamp == state.clock.timestamp


def assert_same_predictions(found, expected):
    for found_pair, expected_pair in zip(found, expected, strict=True):
        for found_one, expected_one in zip(found_pair, expected_pair, strict=True):
            assert found_one.keys() == expected_one.keys()
            for name, value in expected_one.items():
                assert_allclose(
                    np.asarray(found_one[name]), np.asarray(value), rtol=1e-4, atol=1e-4, err_msg=name
                )


@pytest.mark.cuda
def test_predictions_by_graphs_are_those_of_eager_ones_along_a_sequence():
    model = tiny_model().cuda().eval()
    graphs = GraphedPrediction(model, say=lambda text: None)
    with torch.no_grad():
        expected, found = (
            [[predictions_of(s) for s in staged.predictions(*data)] for data in frames("cuda")]
            for staged in (StagedModel(model), StagedModel(model, {"predict": graphs}))
        )
    assert_same_predictions(found, expected)
    assert graphs.counts["replayed"] >= len(SCENES) - 3


@pytest.mark.cuda
@pytest.mark.parametrize("moving", ["img_backbone", "head"])
def test_predictions_by_graphs_follow_weights_that_move_and_return(moving):
    """The graph of the call before is started before it is known whether its weights are still the model's."""
    model = tiny_model().cuda().eval()
    graphs = GraphedPrediction(model, say=lambda text: None)
    parameters = list(getattr(model, moving).parameters())
    of_turn = [[p.data for p in parameters], [1.05 * p.data for p in parameters]]

    def run(graphs):
        staged = StagedModel(model, graphs)
        found = []
        with torch.no_grad():
            for index, data in enumerate(frames("cuda") * 2):
                for parameter, values in zip(parameters, of_turn[index // 3 % 2], strict=True):
                    parameter.data = values
                found.append([predictions_of(s) for s in staged.predictions(*data)])
        return found

    assert_same_predictions(run({"predict": graphs}), run(None))
    assert graphs.counts["replayed"] >= len(SCENES), graphs.report()


def test_parameters_that_autocast_alone_reads_may_be_cast_at_once():
    """Losses and gradients are the same to the bit, and so is what a layer computes in full precision."""
    model = tiny_model()
    batch = map_tensors(torch.clone, model.training_batch(*frames("cpu")[0], None), NotOnDevice)
    plain = leaves_in_place_of(model)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def losses_and_gradients(leaves):
        def run():
            losses = torch.stack(list(model.computed_losses(batch)[0].values()))
            learning = [leaf for leaf in leaves.values() if leaf.requires_grad]
            return losses, torch.autograd.grad(losses.sum(), learning, allow_unused=True)

        for buffer, value in buffers:
            buffer.copy_(value)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            return with_leaves(model, leaves, run)

    with CastsNoted(list(plain.values()), torch.bfloat16) as casts:
        losses, gradients = losses_and_gradients(plain)
    shared = {}
    half = HalfLeaves(plain, casts.only_cast(), torch.bfloat16, shared)
    other_shape = HalfLeaves(plain, casts.only_cast(), torch.bfloat16, shared)
    assert all(half.leaves[p].data_ptr() == leaf.data_ptr() for p, leaf in other_shape.leaves.items())
    half.refresh()
    chosen = {
        name for name, parameter in model.named_parameters() if half.leaves[parameter].dtype != torch.float32
    }
    assert len(chosen) > 100 and "img_backbone.layer1.0.conv1.weight" in chosen
    assert not any("norm" in name or "instance_bank" in name or "anchor_encoder" in name for name in chosen)
    found, found_gradients = losses_and_gradients(half.leaves)
    assert torch.equal(found, losses)
    for one, other in zip(found_gradients, gradients, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one.float(), other))
