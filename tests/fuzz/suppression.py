"""What the problems of suppressing boxes share: scores, labels, and the comparison of what is kept."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.problem import Draw, Problem

__all__ = ["LABELS", "greedily_kept", "random_scores", "same_kept", "with_scores"]


def random_scores(draw: Draw, count: int) -> Tensor:
    scores = draw.uniform(0, 1, count)
    return (scores * 8).round() / 8 if draw.chance(0.3) else scores  # ties


def greedily_kept(scores: Tensor, near: Tensor) -> list[int]:
    """Return the boxes that stay, best first: those that are ``near`` [N, N] to none that stays before."""
    rows, kept = near.tolist(), []
    for i in scores.sort(descending=True, stable=True).indices.tolist():
        if not any(rows[k][i] for k in kept):
            kept.append(i)
    return kept


def with_scores(boxes: Tensor, scores: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return detections and kept indices as the operators do."""
    return torch.cat([boxes[keep], scores[keep, None]], 1), keep


def same_kept(problem: Problem, got: tuple[Tensor, Tensor], expected: dict[str, Any]) -> str:
    """Compare detections and kept indices."""
    count = len(problem.arguments["boxes"])
    keep = got[1]
    if keep.numel() and not bool(((keep >= 0) & (keep < count)).all()):
        return f"kept indices {keep.tolist()} of {count} boxes"
    if problem.skip["output"]:
        return ""
    kept, wanted = keep.tolist(), expected["output 1"].tolist()
    if kept != wanted:
        return f"kept {kept}, expected {wanted}"
    if not torch.allclose(got[0].double(), expected["output"], rtol=1e-5, atol=1e-5):
        return "boxes or scores differ"
    return ""


LABELS = st.sampled_from(["N int64", None])
