"""The loss over two processes of which one has no objects: nobody waits, and all divide by the same number."""

import pytest
import torch
import torch.distributed as dist
from mmengine.structures import InstanceData
from torch.distributed.nn import functional  # noqa: F401 - see start_process_group
from torch.nn.parallel import DistributedDataParallel

from visdet.engine.process.process_group import leave_process_group
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
        targets = PaddedTargets.from_samples(samples, [(32, 32)], hidden_states.device).with_labels_below(2)
        start = DecoderStart(hidden_states[0], None, references[0])
        predictions = self.head.set_predictions(hidden_states, references, start)
        assignment = self.head.assign(self.head.costs(predictions, targets), targets)
        return self.head.losses(predictions, targets, assignment)


def losses(model, num_objects):
    torch.manual_seed(1)
    sample = DetDataSample()
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[1.0, 2, 20, 24], [8, 8, 16, 30], [0, 0, 30, 9]])[:num_objects],
        labels=torch.tensor([0, 1, 1])[:num_objects],
    )
    return model(torch.randn(1, 1, QUERIES, 8), [torch.rand(1, QUERIES, 4)], [sample])


def run_process(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    train(rank, file)
    leave_process_group()


def train(rank, file):
    num_objects = 3 if rank == 0 else 0
    alone = losses(Head(), num_objects)  # collective too: both processes come by
    model = DistributedDataParallel(Head())
    together = losses(model, num_objects)
    sum(together.values()).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    other = gradient.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(gradient, other)
    assert gradient.any()
    for name, loss in together.items():
        torch.testing.assert_close(loss, alone[name])
    torch.save({name: loss.item() for name, loss in together.items()}, f"{file}.{rank}")


@pytest.mark.timeout(120)
def test_one_process_without_objects(tmp_path):
    file = tmp_path / "store"
    torch.multiprocessing.start_processes(run_process, args=(str(file),), nprocs=2, start_method="forkserver")
    with_objects, without = (torch.load(f"{file}.{rank}") for rank in (0, 1))
    mean_objects = 1.5
    for name, loss in losses(Head(), 3).items():  # one process divides by its own 3 objects
        assert with_objects[name] == pytest.approx(loss.item() * 3 / mean_objects, rel=1e-5)
    for name, loss in losses(Head(), 0).items():  # and by 1 where it has none
        assert without[name] == pytest.approx(loss.item() / mean_objects, rel=1e-5)
