"""Parts of a model on two streams of a GPU."""

import pytest
import torch

from visdet.structures.side_stream import in_parallel, side_stream


def test_without_a_side_stream_one_function_runs_after_the_other():
    order = []
    results = in_parallel(lambda: order.append("first") or 1, lambda: order.append("second") or 2)
    assert results == (1, 2) and order == ["first", "second"]


@pytest.mark.cuda
def test_the_second_function_runs_on_the_side_stream_after_all_work_before():
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x = torch.randn(4096, 4096, device="cuda")
    with side_stream(side):
        product = x @ x @ x  # long enough that the side stream would read too early
        streams, values = zip(
            *in_parallel(
                lambda: (torch.cuda.current_stream(), product + 1),
                lambda: (torch.cuda.current_stream(), product + 2),
                reads=product,
            ),
            strict=True,
        )
        assert streams == (main, side) and torch.cuda.current_stream() == main
        assert torch.equal(values[0], product + 1) and torch.equal(values[1], product + 2)
    assert in_parallel(torch.cuda.current_stream, torch.cuda.current_stream) == (main, main)


@pytest.mark.cuda
def test_a_graph_of_two_branches_gives_the_values_and_gradients_of_one():
    torch.manual_seed(0)
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
            lambda: deep(features, layers[:3]), lambda: {"deep": deep(features, layers[3:])}, reads=features
        )
        total = (results[0] * results[1]["deep"]).sum()
        return [total.detach(), *torch.autograd.grad(total, [features, *parameters])]

    expected = step()
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream), side_stream(side), torch.autograd.set_multithreading_enabled(False):
        step()  # cuBLAS makes its plans
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        for found, true in zip(captured, expected, strict=True):
            torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5 * true.abs().max().item())
