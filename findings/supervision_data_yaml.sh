#!/usr/bin/env bash
# supervision 0.31.2: DetectionDataset.as_yolo writes a data.yaml with nc and names alone. Its entries train and val are
# missing, without which ultralytics 8.4.190 refuses the file ("'train:' key missing"). Each split that is written to the same
# data.yaml replaces it, so that nothing in it says that there are splits. Seen on 2026-11-29 with Python 3.11.
# A reader of such a folder has to take the images that it finds, and their splits from the names of the folders.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q supervision==0.31.2 opencv-python-headless==5.0.0.93
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import cv2
import numpy as np
import supervision as sv

boxes = {}
for number in range(4):
    cv2.imwrite(f"{number}.png", np.zeros((80, 100, 3), np.uint8))
    boxes[f"{number}.png"] = sv.Detections(xyxy=np.array([[40.0, 30, 60, 50]]), class_id=np.array([0]))
whole = sv.DetectionDataset(classes=["bolt"], images=list(boxes), annotations=boxes)
for name, part in zip(("train", "valid"), whole.split(0.5)):
    part.as_yolo(f"out/{name}/images", f"out/{name}/labels", "out/data.yaml")
text = open("out/data.yaml").read()
print("supervision", sv.__version__, "data.yaml:", text.split())
has_splits = any(key in text for key in ("train:", "val:"))
sys.exit(has_splits)
PYTHON
