"""The README of an exported model, and a program that runs it on pictures with its runtime and Pillow alone."""

from pathlib import Path
from typing import Any

from visdet.files.writing import write_atomically

_IMPORTS = {
    "pt2": "import torch\nimport visdet.ops  # the operators' libraries; nothing else of visdet is used",
    "aoti": "import torch",
    "onnx": "import onnxruntime",
    "openvino": "import openvino",
}
_LOADING = {
    "pt2": 'model = torch.export.load(folder / "model.pt2").module()',
    "aoti": 'for library in sorted(folder.glob("libvisdet_*.so")):\n    torch.ops.load_library(library)\n'
    'model = torch._inductor.aoti_load_package(str(folder / "model.pt2"))',
    "onnx": 'session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])',
    "openvino": 'model = openvino.Core().compile_model(folder / "model.xml", "CPU", about["options"])',
}
_OF_TORCH = 'outputs = [one.detach().cpu() for one in model(torch.tensor(picture, device=about["device"]))]'
_RUNNING = {
    "pt2": _OF_TORCH,
    "aoti": _OF_TORCH,
    "onnx": 'outputs = session.run(None, {"picture": picture})',
    "openvino": 'found = model([picture])\n    outputs = [found[name] for name in about["outputs"]]',
}
_PROGRAM = '''"""Print the objects in pictures, with their boxes in pixels: python infer.py PICTURE ..."""
import json
import pathlib
import sys
import numpy as np
{imports}
from PIL import Image, ImageOps

folder = pathlib.Path(__file__).parent
about = json.loads((folder / "model.json").read_text())
{loading}

for path in sys.argv[1:] or sys.exit(__doc__):
    try:
        image = ImageOps.exif_transpose(Image.open(open(path, "rb")))
    except OSError as error:
        sys.exit(f"{{path}} cannot be read: {{error}}")
    if image.mode.startswith(("I", "F")):  # The upper 8 of 16 bits count.
        values = np.array(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            sys.exit(f"{{path}} must have 8 or 16 bits: its values of mode {{image.mode}} do not fit 16 bits")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    picture = np.array(image.convert("RGB"))
    {running}
    boxes, scores, labels = (np.asarray(output)[0] for output in outputs)
    for box, score, label in zip(boxes, scores, labels):
        if score >= about["score_thresholds"][label]:
            print(path, about["classes"][label], f"{{score:.4f}}", *(f"{{side:.2f}}" for side in box))
'''
_README = """# {model}, exported as {format} in {precision}

`model.json` describes the inputs and the outputs, and says whether the model was compared (`checked`); `report.md` says
how far it is from the model in Python. `sample.npz` has an input with its outputs.
"""


def write_usage(description: dict[str, Any], folder: Path) -> None:
    """Write ``README.md`` into a folder, and ``infer.py`` if the graph takes a picture and the classes are known.

    Files of the user's that have these names stay.
    """
    format = description["format"]
    options = description["options"]
    text = _README.format(**description)
    files: dict[str, str] = {}
    if options:
        told = ", ".join(f"`{name}` must be `{value}`" for name, value in options.items())
        text += (
            f"\nWhen {format} opens the file, {told}. Without it, results are others on some processors.\n"
        )
    if "picture" in description["inputs"] and description["classes"] and description["score_thresholds"]:
        files["infer.py"] = _PROGRAM.format(
            imports=_IMPORTS[format], loading=_LOADING[format], running=_RUNNING[format]
        )
        text += (
            "\n`python infer.py PICTURE ...` prints the objects in pictures whose scores reach the threshold of their "
            "class (`score_thresholds`).\n"
        )
    files["README.md"] = text
    for name, content in files.items():
        if not (folder / name).exists():
            write_atomically(folder / name, content)
