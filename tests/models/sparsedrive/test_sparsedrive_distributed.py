"""The loss over two processes of which one has no objects: nobody waits, and all divide by the same number."""

import pytest
import torch
import torch.distributed as dist
from tiny_driving import frame, tiny_model
from torch.distributed.nn import functional  # noqa: F401 - see start_process_group
from torch.nn.parallel import DistributedDataParallel

from visdet.engine.process.process_group import leave_process_group
from visdet.engine.stages import StagedModel

COUNTS = (4, 0)


def losses_of(model, count, mode="loss"):
    torch.manual_seed(3)
    return model(*frame([0.0], num_boxes=[count], num_lines=[count and 3]), mode=mode)


def run_process(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    train(rank, file)
    leave_process_group()


def train(rank, file):
    model = DistributedDataParallel(tiny_model().train(), broadcast_buffers=False)
    staged = StagedModel(model)
    for _ in range(2):  # the second frame fails if a gradient of the first was missing
        losses = losses_of(model, COUNTS[rank], staged.losses)
        model.zero_grad()
        sum(losses.values()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    other = gradient.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(gradient, other) and gradient.any()
    first = losses_of(model, COUNTS[rank])
    torch.save({name: loss.item() for name, loss in first.items()}, f"{file}.{rank}")


@pytest.mark.timeout(240)
def test_one_process_without_objects(tmp_path):
    file = tmp_path / "store"
    torch.multiprocessing.start_processes(run_process, args=(str(file),), nprocs=2, start_method="forkserver")
    together = [torch.load(f"{file}.{rank}") for rank in (0, 1)]
    assert list(together[0]) == list(together[1])
    alone = losses_of(tiny_model().train(), COUNTS[0])
    for name, loss in alone.items():
        # 4 boxes (or 3 lines) alone are a mean of 2 (1.5) over both: every sum counts twice.
        factor = 1 if name == "loss_dense_depth" else 2
        assert together[0][name] == pytest.approx(factor * loss.item(), rel=1e-4, abs=1e-6), name
    assert together[1]["det_loss_box_0"] == 0 and together[1]["det_loss_box_dn_0"] == 0
