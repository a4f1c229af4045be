"""The loss over two processes of which one has no objects: nobody waits, and all divide by the same number."""

import pytest
import torch
from tiny_driving import frame, tiny_model
from torch.nn.parallel import DistributedDataParallel
from training_steps import backward
from two_processes import assert_same_gradients, in_two_processes, values

from visdet.engine.stages import StagedModel

COUNTS = (4, 0)


def losses_of(model, count, mode="loss"):
    torch.manual_seed(3)
    return model(*frame([0.0], num_boxes=[count], num_lines=[count and 3]), mode=mode)


def train(count):
    model = DistributedDataParallel(tiny_model(), broadcast_buffers=False)
    staged = StagedModel(model)
    for _ in range(2):  # the second frame fails if a gradient of the first was missing
        losses = losses_of(model, count, staged.losses)
        model.zero_grad()
        backward(losses)
    assert_same_gradients(parameter.grad for parameter in model.parameters() if parameter.requires_grad)
    return values(losses_of(model, count))


@pytest.mark.timeout(240)
def test_one_process_without_objects(tmp_path):
    together = in_two_processes(train, COUNTS, tmp_path / "store")
    assert list(together[0]) == list(together[1])
    alone = losses_of(tiny_model(), COUNTS[0])
    for name, loss in alone.items():
        # 4 boxes (or 3 lines) alone are a mean of 2 (1.5) over both: every sum counts twice.
        factor = 1 if name == "loss_dense_depth" else 2
        assert together[0][name] == pytest.approx(factor * loss.item(), rel=1e-4, abs=1e-6), name
    assert together[1]["det_loss_box_0"] == 0 and together[1]["det_loss_box_dn_0"] == 0
