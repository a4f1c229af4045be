"""Random problems for the tests of suppression."""

import math
import random

import torch

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.9, 1 / 3, 1.0, -0.5, math.nan)
BAD_NUMBERS = (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-40, -0.0)


def of_random_problem(seed, N, columns=4, device="cpu", dtype=None):
    """Return boxes, scores, classes, candidates and a threshold, with ties, overlaps at thresholds and bad numbers."""
    draw, generator = random.Random(seed * 1009 + N), torch.Generator().manual_seed(seed * 1009 + N)
    dtype = dtype or draw.choice([torch.float32, torch.float64])

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    corner, sides = rand(N, 2) * draw.choice([4, 20, 100]), rand(N, 2) * draw.choice([3, 20]) - 0.1
    if draw.random() < 0.5:
        corner, sides = corner.round(), sides.round()
    if columns == 4:
        boxes = torch.cat([corner, corner + sides], 1)
    elif columns == 5:
        boxes = torch.cat([corner, sides, (rand(N, 1) * 8).round() * draw.choice([math.pi / 4, 0.1])], 1)
    else:
        x1, y1, x2, y2 = torch.cat([corner, corner + sides], 1).unbind(1)
        boxes = torch.stack([x1, y1, x2, y1, x2, y2, x1, y2], 1) + rand(N, 8).round() * draw.choice([0, 1])
    scores = rand(N) if draw.random() < 0.5 else (rand(N) * 4).round()
    if draw.random() < 0.3:
        for _ in range(3):
            boxes[draw.randrange(N), draw.randrange(columns)] = draw.choice(BAD_NUMBERS)
            scores[draw.randrange(N)] = draw.choice(BAD_NUMBERS)
    count = draw.choice([0, 1, 4, 30])
    classes = torch.randint(-count, count + 1, (N,), generator=generator) * 10**12 if count else None
    is_candidate = rand(N) < 0.8 if draw.random() < 0.3 else None
    given = (boxes.to(dtype), scores.to(dtype), classes, is_candidate)
    threshold = draw.choice([*THRESHOLDS, draw.random()])
    return *(one if one is None else one.to(device) for one in given), threshold
