"""CUDA graphs in two processes, each with a GPU of its own: losses and gradients are those of eager steps."""

import pytest
import torch
from torch.testing import assert_close

from visdet.engine.graphs.methods import GraphedLoss
from visdet.engine.stages import StagedModel

STEPS = 8


def detr():
    from tiny_detr import batch, build

    def step(index, rank):
        # A shape comes back at another step in each process, so that one captures while the other replays.
        sizes = ((64, 96), (64, 96)) if (index + rank) % 3 else ((64, 80), (50, 96))
        return batch(counts=((index + rank) % 4, 3), sizes=sizes)

    return build("base"), step


def sparsedrive():
    from tiny_driving import frame, tiny_model

    def step(index, rank):
        scenes = ["a", "b" if index < 3 + rank else "c"]
        return frame([0.5 * index] * 2, seed=10 * index + rank, scenes=scenes, num_boxes=(3, 2 * rank))

    return tiny_model(), step


def run_process(rank, folder, family, graph):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/store{graph}", rank=rank, world_size=2
    )
    model, data_of = {"detr": detr, "sparsedrive": sparsedrive}[family]()
    model = model.cuda().train()
    parallel = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[rank], find_unused_parameters=True, broadcast_buffers=False
    )
    graphs = GraphedLoss(model)
    graphs.wrapper = parallel
    staged = StagedModel(model, {"loss": graphs} if graph else None)
    losses, gradients = [], []
    torch.manual_seed(rank)
    torch.cuda.manual_seed(rank)
    with torch.autograd.set_multithreading_enabled(False):
        for index in range(STEPS):
            images, samples = data_of(index, rank)
            data = dict(inputs=images.cuda(), data_samples=[sample.to("cuda") for sample in samples])
            total, log = model.parse_losses(parallel(**data, mode=staged.losses))
            total.backward()
            losses.append(torch.stack([value.detach() for value in log.values()]).cpu())
            found = [p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat(found))
            model.zero_grad()
    torch.save((losses, gradients, dict(graphs.counts)), f"{folder}/{graph}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.cuda(devices=2)
@pytest.mark.parametrize("family", ["detr", "sparsedrive"])
def test_two_processes_replay_what_they_compute_eagerly(family, tmp_path):
    for graph in (False, True):
        torch.multiprocessing.spawn(run_process, args=(tmp_path, family, graph), nprocs=2)
    found = {
        (graph, rank): torch.load(tmp_path / f"{graph}-{rank}.pt")
        for graph in (False, True)
        for rank in (0, 1)
    }
    for rank in (0, 1):
        expected_losses, expected, _ = found[False, rank]
        losses, gradients, counts = found[True, rank]
        assert counts["replayed"] >= STEPS - 4 and "after a failed capture" not in counts, counts
        assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
        for ours, wanted in zip(gradients, expected, strict=True):
            assert (ours - wanted).norm() < 1e-4 * wanted.norm()
    assert_close(found[True, 0][1], found[True, 1][1], rtol=0, atol=0)
