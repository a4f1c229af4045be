#!/bin/bash
# mmengine 0.10.7: MessageHub.update_scalar copies the whole history of a scalar. HistoryBuffer.update appends to two numpy
# arrays by np.append, which allocates them anew, and keeps a million values. An update took 2 us after 100 iterations and
# 679 us after 200,000 on a core of an Intel Xeon, and a model logs each of its losses in each iteration.
# Seen with mmengine 0.10.7 and numpy 2.2.6, 29 November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps mmengine==0.10.7 numpy==2.2.6 addict==2.4.0 pyyaml==6.0.2 rich==14.0.0 \
    termcolor==3.1.0 yapf==0.43.0 platformdirs==4.3.8 opencv-python-headless==4.11.0.86 pygments==2.19.1 \
    markdown-it-py==3.0.0 mdurl==0.1.2 packaging==25.0 matplotlib==3.10.3 contourpy==1.3.2 cycler==0.12.1 \
    fonttools==4.58.0 kiwisolver==1.4.8 pillow==11.2.1 pyparsing==3.2.3 python-dateutil==2.9.0 six==1.17.0
"$folder/venv/bin/python" - <<'PYTHON'
import timeit

from mmengine.logging import HistoryBuffer


def microseconds(iterations):
    """Return the time of an update after so many iterations."""
    buffer = HistoryBuffer([1.0] * iterations, [1] * iterations)
    return min(timeit.repeat(lambda: buffer.update(1.0), number=20, repeat=5)) / 20 * 1e6


early, late = microseconds(100), microseconds(200_000)
print(f"an update takes {early:.0f} us after 100 iterations, {late:.0f} us after 200,000")
raise SystemExit(0 if late > 5 * early else 1)
PYTHON
