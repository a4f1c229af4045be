"""The loss over two processes of which one has no objects: nobody waits, and all divide by the same number."""

import pytest
import torch
from mmengine.structures import InstanceData
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from training_steps import backward
from two_processes import assert_same_gradients, in_two_processes, values

from visdet.models import DeformableDETRHead
from visdet.models.deformable_detr.decoder_start import DecoderStart
from visdet.models.matching import PaddedTargets
from visdet.structures import DetDataSample

QUERIES = 4


class Head(torch.nn.Module):
    """The head alone, behind the one call that DistributedDataParallel watches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = DeformableDETRHead(
            num_classes=2, embed_dims=8, num_pred_layer=1, sync_cls_avg_factor=True
        )

    def forward(self, hidden_states, references, samples):
        head = self.head
        targets = PaddedTargets.from_samples(samples, [(32, 32)], hidden_states.device).with_labels_below(2)
        start = DecoderStart(hidden_states[0], None, references[0])
        predictions = head.set_predictions(hidden_states, references, start)
        assignment = head.assign(head.costs(predictions, targets), targets)
        return head.losses(predictions, targets, assignment)


def losses(model, num_objects):
    torch.manual_seed(1)
    sample = DetDataSample()
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[1.0, 2, 20, 24], [8, 8, 16, 30], [0, 0, 30, 9]])[:num_objects],
        labels=torch.tensor([0, 1, 1])[:num_objects],
    )
    return model(torch.randn(1, 1, QUERIES, 8), [torch.rand(1, QUERIES, 4)], [sample])


def train(num_objects):
    alone = losses(Head(), num_objects)  # collective too: both processes come by
    model = DistributedDataParallel(Head())
    together = losses(model, num_objects)
    backward(together)
    assert_same_gradients(parameter.grad for parameter in model.parameters())
    assert_close(together, alone)
    return values(together)


@pytest.mark.timeout(120)
def test_one_process_without_objects(tmp_path):
    with_objects, without = in_two_processes(train, (3, 0), tmp_path / "store")
    mean_objects = 1.5
    for name, loss in losses(Head(), 3).items():  # one process divides by its own 3 objects
        assert with_objects[name] == pytest.approx(loss.item() * 3 / mean_objects, rel=1e-5)
    for name, loss in losses(Head(), 0).items():  # and by 1 where it has none
        assert without[name] == pytest.approx(loss.item() / mean_objects, rel=1e-5)
