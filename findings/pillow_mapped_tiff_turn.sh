#!/usr/bin/env bash
# Pillow 11.3.0, 12.3.0 and 13.0.0: of an uncompressed TIFF file whose Orientation tag says a quarter turn, Image.open(path)
# gives wrong pixels, and nothing is said. The file is mapped into memory with the sides of the turned image, so that the
# rows of the raster are mixed, and is turned after that. Image.open(file), of the same bytes, gives the right pixels. Files
# in RGB and compressed files are not mapped.
# The script prints which pixels are right and exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/read.py" << 'PYTHON'
import sys

import numpy as np
import PIL
from PIL import Image

QUARTER_TURN = 6
raster = np.arange(6, dtype=np.uint8).reshape(2, 3)
expected = np.rot90(raster, -1)
path = f"{sys.argv[1]}/stored.tiff"
exif = Image.Exif()
exif[0x112] = QUARTER_TURN
Image.fromarray(raster).save(path, exif=exif)
found = {}
with Image.open(path) as image:
    found["by path"] = np.array_equal(np.array(image), expected)
with open(path, "rb") as file, Image.open(file) as image:
    found["by file"] = np.array_equal(np.array(image), expected)
print("Pillow", PIL.__version__, found)
sys.exit(found != {"by path": False, "by file": True})
PYTHON
for version in 11.3.0 12.3.0 13.0.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "pillow==$version" numpy==2.2.6
    "$folder/$version/bin/python" "$folder/read.py" "$folder"
done
