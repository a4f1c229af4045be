#!/usr/bin/env bash
# opencv-python-headless 4.12.0.88 and 5.0.0.93: IMREAD_UNCHANGED and IMREAD_IGNORE_ORIENTATION keep the stored raster of
# JPEG, PNG and WebP files with an EXIF orientation, but not of TIFF files. A TIFF file whose Orientation tag says half a
# turn is turned by every flag, so that camera matrices do not fit what is read, and nothing is said. One with a quarter
# turn is not read at all by these flags: imread returns None.
# The script prints the shapes that are read and exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/read.py" << 'PYTHON'
import sys

import cv2
import numpy as np
from PIL import Image

FLAGS = {
    "unchanged": cv2.IMREAD_UNCHANGED,
    "ignore orientation": cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION,
}
HALF_TURN, QUARTER_TURN = 3, 6
raster = np.zeros((48, 80, 3), np.uint8)
raster[:16, :16] = 255  # the upper left corner is white


def seen(path, flag):
    image = cv2.imread(path, flag)
    if image is None:
        return "not read"
    if image.shape[:2] != (48, 80):
        return "turned"
    return "as stored" if image[:16, :16].mean() > 128 else "turned"


has_changed = False
for orientation in (HALF_TURN, QUARTER_TURN):
    exif = Image.Exif()
    exif[0x112] = orientation
    for suffix in ("jpg", "png", "webp", "tiff"):
        path = f"{sys.argv[1]}/stored.{suffix}"
        Image.fromarray(raster).save(path, exif=exif)
        found = {name: seen(path, flag) for name, flag in FLAGS.items()}
        print("OpenCV", cv2.__version__, suffix, "orientation", orientation, found)
        expected = "as stored"
        if suffix == "tiff":
            expected = "turned" if orientation == HALF_TURN else "not read"
        has_changed |= set(found.values()) != {expected}
sys.exit(has_changed)
PYTHON
for version in 4.12.0.88 5.0.0.93; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "opencv-python-headless==$version" pillow==12.1.1
    "$folder/$version/bin/python" "$folder/read.py" "$folder"
done
