"""Boxes of an image, written as rows."""

from collections.abc import Sequence

import torch
from mmengine.structures import InstanceData


def truth_of(rows: Sequence[tuple]) -> InstanceData:
    """Return the instances of rows (label, xyxy)."""
    return InstanceData(
        bboxes=torch.tensor([row[1] for row in rows], dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor([row[0] for row in rows], dtype=torch.int64),
    )


def predictions_of(rows: Sequence[tuple]) -> InstanceData:
    """Return the instances of rows (label, xyxy, score)."""
    found = truth_of(rows)
    found.scores = torch.tensor([row[2] for row in rows], dtype=torch.float32)
    return found
