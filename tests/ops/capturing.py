"""Capture of a step as a CUDA graph."""

import torch

__all__ = ["captured"]


def captured(step):
    """Return the graph of a step, which runs once on a stream of its own before, and the results that it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
