"""The linear layer of models: torch's, or visdet's operator where rows are many."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from visdet.models.layers import FFN, MultiheadAttention
from visdet.models.layers.linear import Linear, cast_weight, weights_cast_together
from visdet.structures.replayed_launches import are_launches_replayed, launches_are_replayed


def test_it_is_torchs_layer():
    torch.manual_seed(0)
    layer = Linear(6, 4)
    stock = nn.Linear(6, 4)
    stock.load_state_dict(layer.state_dict())
    input = torch.randn(3, 5, 6)
    assert isinstance(layer, nn.Linear) and repr(layer) == repr(stock)
    assert torch.equal(layer(input), stock(input))
    assert torch.equal(Linear(6, 4, bias=False)(input[:0]), input[:0, :, :4])


def test_blocks_of_replayed_launches_may_be_nested():
    assert not are_launches_replayed()
    with launches_are_replayed():
        with launches_are_replayed():
            assert are_launches_replayed()
        assert are_launches_replayed()
    assert not are_launches_replayed()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "replayed", "by_the_operator"),
    [
        (8191, True, False),
        (8192, True, True),
        (8192, False, False),
        (65535, False, False),
        (65536, False, True),
    ],
)
def test_many_rows_are_computed_by_the_operator(rows, replayed, by_the_operator):
    torch.manual_seed(0)
    layer = Linear(16, 8).cuda()
    stock = copy.deepcopy(layer)
    stock.__class__ = nn.Linear
    input = torch.randn(1, rows, 16, device="cuda")
    grads = []
    for each in (layer, stock):
        with launches_are_replayed() if replayed else nullcontext(), torch.autocast("cuda", torch.bfloat16):
            output = each(input)
        assert ("_AutocastLinear" in str(output.grad_fn)) == (by_the_operator and each is layer)
        output.float().square().sum().backward()
        grads.append([parameter.grad for parameter in each.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() <= 2e-2 * other.norm()


class Block(nn.Module):
    """A self-attention and a feed-forward block that is used twice."""

    def __init__(self):
        super().__init__()
        self.attention = MultiheadAttention(8, 2, batch_first=True)
        self.ffn = FFN(8, 16)

    def forward(self, x):
        return self.ffn(self.ffn(self.attention(x)))


def gradients(block, together, dtype=torch.bfloat16, recomputes=False):
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8, requires_grad=True)
    block.zero_grad()
    with torch.autocast("cpu", dtype), weights_cast_together(block) if together else nullcontext():
        out = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    out.square().sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in block.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recomputes", [False, True])
def test_weights_that_are_cast_together_have_the_gradients_of_autocast(dtype, recomputes):
    torch.manual_seed(0)
    block = Block()
    expected = gradients(block, False, dtype, recomputes)
    for one, other in zip(gradients(block, True, dtype, recomputes), expected, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)


def test_weights_are_cast_by_one_call():
    block = Block()
    with torch.profiler.profile() as profile:
        gradients(block, True)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_foreach_copy_"] == 2  # one for the weights, one for their gradients


def test_frozen_and_unused_weights_get_no_gradients():
    block = Block()
    unused = Linear(8, 8)
    block.add_module("unused", unused)
    block.ffn.layers[0][0].weight.requires_grad_(False)
    *_, of_unused_weight, of_unused_bias = gradients(block, True)
    assert of_unused_weight is of_unused_bias is block.ffn.layers[0][0].weight.grad is None
    assert all(
        parameter.grad is not None
        for name, parameter in block.named_parameters()
        if "unused" not in name and name != "ffn.layers.0.0.weight"
    )


def test_copies_serve_the_block_and_autocast_of_its_type_alone():
    layer = Linear(4, 3)
    other, attention = nn.Linear(4, 3), nn.MultiheadAttention(4, 2)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with weights_cast_together(nn.ModuleList([layer, other, attention])):
            assert cast_weight(layer.weight).dtype == torch.bfloat16
            assert cast_weight(attention.in_proj_weight).dtype == torch.bfloat16
            for weight in (other.weight, attention.out_proj.weight):  # Layers of torch are left to autocast.
                assert cast_weight(weight) is weight
            with torch.autocast("cpu", enabled=False):
                assert cast_weight(layer.weight) is layer.weight
                assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
            with torch.autocast("cpu", torch.float16):
                assert layer(x).dtype == torch.float16
            with weights_cast_together(other):
                assert cast_weight(layer.weight).dtype == torch.bfloat16
        assert cast_weight(layer.weight) is layer.weight
        for context in (torch.no_grad(), launches_are_replayed()):
            with context, weights_cast_together(layer):
                assert cast_weight(layer.weight) is layer.weight
    with weights_cast_together(layer):
        assert cast_weight(layer.weight) is layer.weight
    with pytest.raises(KeyError), torch.autocast("cpu", torch.bfloat16), weights_cast_together(layer):
        raise KeyError
    assert cast_weight(layer.weight) is layer.weight


def test_copies_may_be_differentiated_twice():
    layer = Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    seconds = []
    for together in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16),
            weights_cast_together(layer) if together else nullcontext(),
        ):
            out = layer(x)
        (first,) = torch.autograd.grad(out.float().pow(3).sum(), layer.weight, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), layer.weight))
    torch.testing.assert_close(*seconds, rtol=2e-2, atol=2e-2)


def test_compiled_layers_have_weights_of_their_own():
    """The third layer may run the code that was compiled for the second one."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Linear(4, 4) for _ in range(4)])
    x = torch.randn(3, 4)

    def run():
        layers.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), weights_cast_together(layers):
            out = x
            for layer in layers:
                out = layer(out)
        out.float().square().sum().backward()
        return [out, *(parameter.grad for parameter in layers.parameters())]

    expected = run()
    for layer in layers:
        layer.compile(backend="aot_eager")
    found = run()
    assert all(one is not None for one in found)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("watched", ["the module", "a part"])
def test_hooks_before_the_forward_of_a_part_see_its_weights_used(watched):
    """Such a hook may change the weights, as pruning does, or gather them from other processes."""
    layers = nn.Sequential(Linear(4, 3), Linear(3, 2))

    def clear(module, _):
        module[0].weight.data.zero_() if module is layers else module.weight.data.zero_()

    (layers if watched == "the module" else layers[0]).register_forward_pre_hook(clear)
    layers[0].bias.data.zero_()
    forward = layers.forward

    def cast(x):
        with weights_cast_together(layers):
            assert (cast_weight(layers[1].weight) is layers[1].weight) == (watched == "a part")
            return forward(x)

    layers.forward = cast
    with torch.autocast("cpu", torch.bfloat16):
        out = layers(torch.randn(5, 4))
    assert torch.equal(out, layers[1].bias.bfloat16().expand(5, 2))


def test_launches_are_replayed_as_long_as_the_condition_holds():
    holds = [True]
    with launches_are_replayed(lambda: holds[0]):
        assert are_launches_replayed()
        holds[0] = False
        assert not are_launches_replayed()


class Masked(Linear):
    """A layer that changes its weight in its forward."""

    def forward(self, x):
        self.weight.data.zero_()
        return super().forward(x)


@pytest.mark.parametrize(
    "change", ["subclass", "forward", "forward of a container", "global hook", "hooked weight"]
)
def test_parts_that_may_change_their_weights_are_left_to_autocast(change):
    first = Masked(4, 3) if change == "subclass" else Linear(4, 3)
    nn.init.zeros_(first.bias)
    layers = nn.Sequential(nn.Sequential(first), Linear(3, 2))
    handle, called = None, []
    if change in ("forward", "forward of a container"):
        part = first if change == "forward" else layers[0]
        original = part.forward
        part.forward = lambda x: (first.weight.data.zero_(), original(x))[1]
    if change == "global hook":

        def clear(part, _):
            if part is first:
                part.weight.data.zero_()

        handle = nn.modules.module.register_module_forward_pre_hook(clear)
    if change == "hooked weight":
        first.weight.data.zero_()
        first.weight.register_hook(lambda grad: called.append(grad.dtype))
    try:
        with torch.autocast("cpu", torch.bfloat16), weights_cast_together(layers):
            assert cast_weight(first.weight) is first.weight
            out = layers(torch.randn(5, 4))
    finally:
        if handle is not None:
            handle.remove()
    assert torch.equal(out, layers[1].bias.bfloat16().expand(5, 2))
    out.sum().backward()
    assert called == [torch.float32] * (change == "hooked weight")


def test_threads_have_copies_of_their_own():
    layer = Linear(4, 3)
    seen = []

    def look():
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(cast_weight(layer.weight))

    with torch.autocast("cpu", torch.bfloat16), weights_cast_together(layer):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert cast_weight(layer.weight).dtype == torch.bfloat16
    assert seen[0] is layer.weight


@pytest.mark.parametrize("sharded", ["each block", "parts of blocks"])
def test_gradients_of_shards_are_complete(sharded, tmp_path):
    """FSDP takes the gradients of what it has gathered when the backward pass of the sharded module ends."""

    class Layer(Block):
        def forward(self, x):
            with weights_cast_together(self):
                return super().forward(x)

    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer())
    model = copy.deepcopy(plain)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = model if sharded == "each block" else [part for layer in model for part in layer.children()]
        for part in parts:
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        x = torch.randn(2, 5, 8)
        for each in (plain, model):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                each(x)  # Without resharding, this leaves the weights gathered.
            with torch.autocast("cpu", torch.bfloat16):
                out = each(x)
            out.square().sum().backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert one.grad is not None, name
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-2, atol=1e-2)
    finally:
        torch.distributed.destroy_process_group()
