#!/usr/bin/env bash
# torchvision 0.29.1: horizontal_flip of KeyPoints takes a point at x to width - 1 - x, and of BoundingBoxes to width - x,
# so that the corners of a box and the box part by one pixel. Images are resized and rotated by the latter rule in both.
# resize of BoundingBoxes with the format XYXYXYXY to other proportions makes a rectangle again of the parallelogram that
# the box becomes, which moves corners by many pixels. Its KeyPoints stay on the pixels. Seen on 2026-11-29, Python 3.11.
# Corners of turned boxes are KeyPoints that need a flip of their own.
# The script prints both and exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
import torchvision
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

corners = torch.tensor([[30.0, 10.0], [50.0, 30.0], [40.0, 40.0], [20.0, 20.0]])
canvas = {"canvas_size": (60, 100)}
points = tv_tensors.KeyPoints(corners, **canvas)
boxes = tv_tensors.BoundingBoxes(corners.reshape(1, 8), format="XYXYXYXY", **canvas)
flipped = F.horizontal_flip(points)[:, 0].sort()[0], F.horizontal_flip(boxes)[:, ::2].sort()[0][0]
between_flips = (flipped[1] - flipped[0]).tolist()
resized = F.resize(points, [60, 300]).reshape(-1), F.resize(boxes, [60, 300])[0]
between_sizes = float((resized[0] - resized[1]).abs().max())
print("torchvision", torchvision.__version__, "flips part by", between_flips, "and resized corners by", between_sizes)
sys.exit(not (between_flips == [1.0] * 4 and between_sizes > 5))
PYTHON
