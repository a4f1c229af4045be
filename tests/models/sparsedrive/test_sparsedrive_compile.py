"""SparseDrive under torch.compile: what runs on the device is one graph, and the host's work before it is none."""

import torch
from tiny_driving import motion_frame, tiny_stage2
from torch.testing import assert_close

from visdet.execution.tensor_tree import tensors_of


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
            assert_close(tensors_of(found), tensors_of(expected[0]), rtol=1e-4, atol=1e-4)
            state = model.state_after(expected, batch)
