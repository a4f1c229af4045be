"""SparseDrive under torch.compile: what runs on the device is one graph, and the host's work before it is none."""

import copy

import torch
from test_frozen_perception import motion_frame, tiny_stage2
from tiny_driving import frame, tiny_config

from visdet.execution.tensor_tree import tensors_of
from visdet.registry import MODELS


def two_layers(head):
    """Half the default time: one layer starts, and one is as all later ones."""
    for part in (head.det_head, head.map_head):
        order = list(part.operation_order)
        second = order.index("refine", order.index("refine") + 1)
        part.update(operation_order=order[: second + 1], num_decoder=2)


def test_from_images_to_results_there_is_one_graph():
    model = tiny_stage2(two_layers).eval()
    torch._dynamo.reset()
    compiled = torch.compile(lambda batch: model.detections(batch), fullgraph=True, backend="eager")
    state = None
    with torch.no_grad():
        for time in (0.0, 0.5):  # without and with a frame before
            batch = model.prediction_batch(*motion_frame([time, time], seed=int(2 * time)), state)
            found, _ = compiled(batch)
            expected = model.detections(batch)
            for one, other in zip(tensors_of(found), tensors_of(expected[0]), strict=True):
                torch.testing.assert_close(one, other)
            state = model.state_after(expected, batch)


def test_frames_of_a_compiled_model_are_those_of_the_model():
    config = tiny_config()
    two_layers(config.head)
    model = MODELS.build(config).eval()
    model.init_weights()
    compiled = torch.compile(copy.deepcopy(model).step, backend="eager")
    torch._dynamo.reset()
    states = [None, None]
    with torch.no_grad():
        for time in (0.0, 0.5):
            images, data = frame([time, time], seed=int(2 * time))
            found, states[0] = compiled(images, data, states[0])
            expected, states[1] = model.step(images, data, states[1])
            for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
                torch.testing.assert_close(one, other)
