"""What every operator promises: sound registration, no copies for the backward pass, autocast, graphs, threads."""

import pytest
import torch
from calls import captured, in_order, kept_for_backward
from torch import Tensor
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz.check import bits, numbers_of
from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw
from visdet.execution.tensor_tree import map_tensors, tensors_of
from visdet.ops import _library

SIZED = [(name, number) for name, operator in OPERATORS.items() for number in range(len(operator.of_size))]
sized = pytest.mark.parametrize(("name", "number"), SIZED)
DRAWN = 60  # random problems, of which the largest are shared by several threads


def problem_of(name, number, size, device):
    return map_tensors(lambda one: one.to(device), OPERATORS[name].of_size[number](size))


def results(name, problem):
    """Return the results and the gradients of a call."""
    given = map_tensors(Tensor.detach, problem.arguments)
    chosen = tensors_of([given[key] for key in given if key in problem.differentiable])
    leaves = [one.requires_grad_() for one in chosen if one.is_floating_point()]
    outputs = tensors_of(OPERATORS[name].call(**given))
    sources = [one for one in outputs if one.requires_grad]
    if not sources or not leaves:
        return outputs
    ones = [torch.ones_like(one) for one in sources]
    grads = torch.autograd.grad(sources, leaves, ones, allow_unused=True, materialize_grads=True)
    return [one.detach() for one in (*outputs, *grads)]


class Recorded(TorchDispatchMode):
    """Keeps the calls of visdet's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.namespace == "visdet":
            self.calls.append((operator, arguments))
        return operator(*arguments, **(options or {}))


def differentiable(operator):
    """Return the names of the arguments to which the operator gives gradients, by the schema of its backward."""
    name = operator._schema.name.removeprefix("visdet::")
    if name.endswith("_backward") or not hasattr(torch.ops.visdet, f"{name}_backward"):
        return set()
    backward = getattr(torch.ops.visdet, f"{name}_backward").default
    return {result.name.removeprefix("grad_") for result in backward._schema.returns}


@sized
def test_registrations(name, number, device):
    with Recorded() as recorded:
        results(name, problem_of(name, number, 3, device))
    if not recorded.calls:
        pytest.skip("plain torch or torchvision serves it")
    for operator, arguments in recorded.calls:
        names = [argument.name for argument in operator._schema.arguments]
        with_gradients = differentiable(operator)
        opcheck(
            operator,
            tuple(
                value.detach().clone().requires_grad_(argument in with_gradients)
                if isinstance(value, Tensor)
                else value
                for argument, value in zip(names, arguments, strict=False)
            ),
        )


# They may bring references into another form, or are plain torch on the CPU.
COPIES = {
    "box_key_points",
    "deformable_aggregation_fused",
    "local_aggregate",
}


@pytest.mark.parametrize(
    ("name", "number", "device"),
    [(*one, "cpu") for one in SIZED if one[0] not in COPIES]
    + [
        pytest.param(f"{name}_fused", 0, "cuda", marks=pytest.mark.cuda)
        for name in ("deformable_aggregation", "ms_deform_attn")
    ],
)
def test_the_backward_pass_keeps_no_numbers_but_the_arguments(name, number, device):
    problem = problem_of(name, number, 5, device)
    with kept_for_backward() as kept:
        results(name, problem)
    given = {value.data_ptr() for value in tensors_of(problem.arguments)}
    assert all(one.data_ptr() in given for one in kept if one.is_floating_point() and one.numel() > 1)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "autocast_linear"])
def test_autocast_changes_no_number_and_no_type(name, device):
    """Coordinates in 16 bits would be other ones. Values may have 16 bits, and results have the values' type."""
    for problem in sound_problems(name, device, 5):
        with torch.set_grad_enabled(bool(OPERATORS[name].of_size)):  # those of torch may have 16 bits
            expected = results(name, problem)
            with torch.autocast(device, torch.bfloat16):
                found = results(name, problem)
        assert_close(found, expected, equal_nan=True)  # types, too


of_each_operator = pytest.mark.parametrize("name", OPERATORS)


@of_each_operator
def test_another_default_device_changes_nothing(name):
    for problem in sound_problems(name, "cpu", 3):
        expected = results(name, problem)
        with torch.device("meta"):
            found = results(name, problem)
        assert_close(found, expected, equal_nan=True)


def sound_problems(name, device, count):
    for draw in (Draw(name, seed, device) for seed in range(count)):
        draw.has_bad_numbers = False
        problem = OPERATORS[name].draw(draw)
        if not problem.must_refuse and not problem.may_refuse:
            yield problem


@sized
def test_tensors_without_data_give_the_shapes(name, number):
    problem = problem_of(name, number, 5, "cpu")
    expected = results(name, problem)
    problem.arguments = problem_of(name, number, 5, "meta").arguments
    for one, other in zip(results(name, problem), expected, strict=True):
        assert (one.device.type, one.shape, one.dtype) == ("meta", other.shape, other.dtype)


def large_problems(name, count=3):
    """Return problems of an operator with many rows, and of random ones those with most numbers."""
    drawn = [OPERATORS[name].draw(Draw(name, seed, "cpu")) for seed in range(DRAWN)]
    sound = [problem for problem in drawn if not problem.may_refuse and not problem.must_refuse]
    return [of_size(2000) for of_size in OPERATORS[name].of_size] + sorted(sound, key=numbers_of)[-count:]


def have_equal_bits(found):
    """Return whether the results of several runs are the same."""
    return all(
        torch.equal(bits(one), bits(other))
        for others in found[1:]
        for one, other in zip(found[0], others, strict=True)
    )


@pytest.mark.cuda
@sized
def test_a_graph_repeats_a_step(name, number):
    """A graph of forward and backward on a stream of its own reads what its arguments hold when it is replayed."""
    if name == "dynamic_voxelize":
        pytest.skip("its sizes are lists, which a graph cannot copy to the device")
    problem = problem_of(name, number, 5, "cuda")
    first = tensors_of(problem.arguments)[0]
    expected, numbers = results(name, problem), first.clone()
    graph, found = captured(lambda: results(name, problem))
    first.zero_()
    graph.replay()
    first.copy_(numbers)
    graph.replay()
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda(devices=2)
@sized
def test_a_second_gpu_serves_while_the_first_is_current(name, number):
    found = results(name, problem_of(name, number, 5, "cuda:1"))
    assert torch.cuda.current_device() == 0 and all(one.device.index == 1 for one in found)
    expected = results(name, problem_of(name, number, 5, "cpu"))
    assert_close([one.cpu() for one in found], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@sized
def test_deterministic_algorithms_repeat_every_bit(name, number):
    problem = problem_of(name, number, 2000, "cuda")
    with in_order(), Recorded() as recorded:
        found = [results(name, problem) for _ in range(3)]
    if not recorded.calls:
        pytest.skip("plain torch or torchvision serves it")
    assert have_equal_bits(found)


@of_each_operator
def test_threads_change_no_bit(name):
    problems = large_problems(name)
    with Recorded() as recorded:
        if not problems or not results(name, problems[0]) or not recorded.calls:
            pytest.skip("visdet has no kernels for it on the CPU")
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append([one for problem in problems for one in results(name, problem)])
    finally:
        torch.set_num_threads(threads)
    assert have_equal_bits(found)


@of_each_operator
def test_plain_torch_serves_where_the_library_is_missing(name, monkeypatch):
    problems = [problem_of(name, number, 3, "cpu") for number in range(len(OPERATORS[name].of_size))]
    problems = problems or large_problems(name)
    expected = [results(name, problem) for problem in problems]
    monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    for problem, wanted in zip(problems, expected, strict=True):
        assert_close(results(name, problem), wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
