#!/bin/bash
# mmengine 0.10.7: ExponentialMovingAverage with update_buffers=True, as mmdet's RTMDet configs use it, goes through the
# state dict, which has a tensor of several layers under each of its names, and moves its average once for each of them.
# In a DETR whose six decoder layers share the branches of the head, their averages follow the weights six times as fast
# as those of all other layers, whatever momentum the config names. Without update_buffers they are moved once.
# Seen with mmengine 0.10.7 and torch 2.14.1, 30 November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.14.1
"$folder/venv/bin/pip" install -q --no-deps mmengine==0.10.7 numpy==2.2.6 addict==2.4.0 pyyaml==6.0.2 rich==14.0.0 \
    termcolor==3.1.0 yapf==0.43.0 platformdirs==4.3.8 opencv-python-headless==4.11.0.86 pygments==2.19.1 \
    markdown-it-py==3.0.0 mdurl==0.1.2 packaging==25.0 matplotlib==3.10.3 contourpy==1.3.2 cycler==0.12.1 \
    fonttools==4.58.0 kiwisolver==1.4.8 pillow==11.2.1 pyparsing==3.2.3 python-dateutil==2.9.0 six==1.17.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from mmengine.model import ExponentialMovingAverage
from torch import nn

MOMENTUM, LAYERS = 0.1, 6


def moved(update_buffers):
    """Return how far the averages of a shared and of another bias, both 0, have come towards the weights, both 1."""
    shared = nn.Linear(1, 1)
    model = nn.ModuleDict({"branches": nn.ModuleList([shared] * LAYERS), "other": nn.Linear(1, 1)})
    biases = shared.bias, model["other"].bias
    with torch.no_grad():
        for bias in biases:
            bias.zero_()
    average = ExponentialMovingAverage(model, momentum=MOMENTUM, update_buffers=update_buffers)
    average.update_parameters(model)
    with torch.no_grad():
        for bias in biases:
            bias.fill_(1)
    average.update_parameters(model)
    return average.module["branches"][0].bias.item(), average.module["other"].bias.item()


for update_buffers in (False, True):
    print(f"update_buffers={update_buffers}: shared %.3f, other %.3f" % moved(update_buffers))
once, often = MOMENTUM, 1 - (1 - MOMENTUM) ** LAYERS
as_seen = (once, once), (often, once)
found = torch.tensor([moved(False), moved(True)])
raise SystemExit(0 if torch.allclose(found, torch.tensor(as_seen)) else 1)
PYTHON
