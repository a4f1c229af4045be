"""What a capture gives the code of a model: a second stream of a GPU, and tables that stay alive."""

import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from visdet.execution.capture import captures, in_parallel, keeps_tables, recomputed


def test_without_a_capture_one_function_runs_after_the_other():
    order = []
    results = in_parallel(lambda: order.append("first") or 1, lambda: order.append("second") or 2)
    assert results == (1, 2) and order == ["first", "second"]


@pytest.mark.cuda
def test_the_second_function_runs_on_the_side_stream_after_all_work_before():
    current_stream = torch.cuda.current_stream
    side, main = torch.cuda.Stream(), current_stream()
    x = torch.randn(4096, 4096, device="cuda")
    with captures(side):
        product = x @ x @ x  # long enough that the side stream would read too early
        streams, values = zip(
            *in_parallel(
                lambda product: (current_stream(), product + 1),
                lambda product: (current_stream(), product + 2),
                [product],
            ),
            strict=True,
        )
        assert streams == (main, side) and current_stream() == main
        assert torch.equal(values[0], product + 1) and torch.equal(values[1], product + 2)
    assert in_parallel(current_stream, current_stream) == (main, main)


@pytest.mark.cuda
def test_a_graph_of_two_branches_gives_the_values_and_gradients_of_one():
    layers = [torch.nn.Linear(64, 64, device="cuda") for _ in range(6)]
    x = torch.randn(3000, 64, device="cuda")
    parameters = [parameter for layer in layers for parameter in layer.parameters()]

    def deep(features, part):
        for layer in part:
            features = layer(features).relu()
        return features

    def step():
        features = x.sin().requires_grad_()
        results = in_parallel(
            lambda features: deep(features, layers[:3]),
            lambda features: {"deep": deep(features, layers[3:])},
            [features],
        )
        total = (results[0] * results[1]["deep"]).sum()
        return [total.detach(), *torch.autograd.grad(total, [features, *parameters])]

    expected = step()
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream), captures(side), torch.autograd.set_multithreading_enabled(False):
        step()  # cuBLAS makes its plans
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        for found, true in zip(captured, expected, strict=True):
            assert_close(found, true, rtol=1e-5, atol=1e-5 * true.abs().max().item())


def test_tables_are_kept_under_modes_that_compute():
    makes = []
    make = keeps_tables(max_sizes=2)(lambda size: makes.append(size) or torch.arange(size))
    with FlopCounterMode(display=False):
        assert make(3) is make(3)
    with FakeTensorMode():
        assert make(4) is not make(4)
    assert makes == [3, 4, 4] and type(make(4)) is torch.Tensor


def test_tables_live_as_long_as_the_capture_that_has_read_them():
    class Table:
        pass

    make = keeps_tables(max_sizes=1)(lambda size: Table())
    with captures(side=None) as capture:
        first = weakref.ref(make(1))
    second = weakref.ref(make(2))  # takes the place of the first
    assert first() is capture.tables[0] and len(capture.tables) == 1 and make(2) is second()
    del capture
    assert first() is None
    make(3)
    assert second() is None


def test_another_thread_takes_no_part_in_a_capture():
    make = keeps_tables(max_sizes=1)(lambda size: [size])
    with captures(side=None) as capture:
        thread = threading.Thread(target=lambda: (make(1), in_parallel(lambda: 1, lambda: 2)))
        thread.start()
        thread.join()
        assert capture.tables == []


def test_what_is_recomputed_in_a_capture_reads_no_generator(monkeypatch):
    def fail():
        raise RuntimeError("a capture")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "get_rng_state", fail)
    x = torch.ones(1, requires_grad=True)
    recomputed(torch.nn.Sigmoid(), x).backward()
    assert x.grad
