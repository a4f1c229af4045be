"""The order of an export: wrap, trace, write, run, compare, report."""

import importlib
import importlib.util
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import visdet
from visdet.errors import MissingPackageError, check_choice

from .check import Run, arrays, compare, graphed, latencies
from .errors import ExportError
from .families import family_of
from .families.family import Family
from .precision import LIMITS, with_features_in
from .program import DESCRIPTION
from .report import write_report

FORMATS = ("pt2", "aoti", "onnx", "openvino")


def export(
    model: nn.Module,
    out: str | Path,
    format: Literal["pt2", "aoti", "onnx", "openvino"] = "pt2",
    precision: Literal["float32", "float16", "bfloat16", "int8"] = "float32",
    *,
    shape: Sequence[int] | None = None,
    batch: int | None = None,
    classes: Sequence[str] | None = None,
    preprocessing: Any = None,
    check: bool = True,
    bench: bool = False,
    evaluate: Any = None,
    calibration: Any = None,
    custom_op: Literal["openvino", "tensorrt"] | None = None,
) -> dict[str, Any]:
    """Write a model into a folder, run it in the runtime of the format, compare it, and return the report.

    The folder then has the model, ``model.json`` (inputs, outputs, pre- and post-processing, classes, versions),
    ``sample.npz`` (an input with its outputs), ``report.json`` and ``report.md``.

    Args:
        model: the model, whose mode becomes that of evaluation.
        out: the folder to write.
        format: 'pt2', 'aoti', 'onnx' or 'openvino'.
        precision: the type of image features, that is of the weights and the arithmetic of backbone and neck. What
            follows is float32. The differences of the report are those from the model in the same precision, and with
            'int8' from the model in float32.
        shape: the (height, width) of the images. By default any size is accepted where the model's can change.
        batch: the number of images at once. By default any number is accepted.
        classes: the names of the classes.
        preprocessing: what is done with images before, for ``model.json``, in numbers, texts, lists and dicts.
        check: whether what was written is run and compared. Without it, the report says so.
        bench: whether latencies are measured, of the exported model and of the model itself.
        evaluate: a function of the family and of what runs the exported model, which returns a part of the report with
            metrics, and raises an error if they differ too much.
        calibration: a function of the family that yields inputs from data. 'int8' needs it, and ``evaluate``.
        custom_op: 'openvino' puts nodes of visdet's CPU kernels into the graph of format 'openvino', and compiles them.
            'tensorrt' puts nodes of NVIDIA's MultiscaleDeformableAttnPlugin into that of format 'onnx', which is then
            run by onnx's reference implementation, not by TensorRT.

    Raises:
        ExportError: the model cannot be exported so, or the exported model gives other results.
        MissingPackageError: a package that writes or runs the format is not installed.
    """
    check_choice("format", format, FORMATS)
    check_choice("precision", precision, tuple(LIMITS))
    limit, _ = LIMITS[precision]
    if precision == "bfloat16" and format in ("onnx", "openvino"):
        raise ExportError("precision 'bfloat16': ONNX has no convolution in bfloat16. float16 is possible")
    if precision == "int8" and (format not in ("onnx", "openvino") or custom_op or not calibration):
        raise ExportError(
            "precision 'int8' needs format 'onnx' or 'openvino' without custom_op, and data with annotations "
            "(--check), which give the ranges of numbers and show the loss"
        )
    module = format_module(format)
    family = family_of(
        with_features_in(model, precision), None if shape is None else (int(shape[0]), int(shape[1])), batch
    )
    if custom_op is not None and (format, custom_op) not in (("openvino", "openvino"), ("onnx", "tensorrt")):
        raise ExportError(
            "custom_op must be 'openvino' with format 'openvino', or 'tensorrt' with format 'onnx', "
            f"got {custom_op!r} with format {format!r}"
        )
    program = replace(
        family.program(),
        custom_op=custom_op,
        calibration=calibration(family) if precision == "int8" else None,
    )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    description = _description(
        family, program.dynamic, program.ranges, format, precision, classes, preprocessing
    )
    (folder / DESCRIPTION).write_text(json.dumps({**description, "checked": False}, indent=1))
    try:
        module.write(program, folder)
    except (torch._dynamo.exc.TorchDynamoException, torch.onnx.OnnxExporterError) as error:
        # The first cause has the operator that ONNX lacks.
        reason = (error.__cause__ and error.__cause__.__cause__) or error
        raise ExportError(
            f"torch {torch.__version__} cannot write the model as {format} ({str(reason).splitlines()[0]}). If the "
            "sizes that may change are the reason, fix them (--shape, --batch); or choose another format, such as pt2"
        ) from error
    report: dict[str, Any] = {
        "format": format,
        "precision": precision,
        "checked": check,
        "bytes": {p.name: p.stat().st_size for p in sorted(folder.glob("model*")) if p.is_file()},
    }
    if not check:
        report["remark"] = "the exported model was not run and not compared (--no-check)"
        write_report(report, folder)
        return report
    run: Run = module.load(folder)
    differences, inputs, outputs = compare(family, run, limit)
    named = {
        f"{kind}.{name}": tensor
        for kind, tensors in (("input", inputs), ("output", outputs))
        for name, tensor in tensors.items()
    }
    np.savez(folder / "sample.npz", **arrays(named))  # type: ignore[arg-type]
    report["differences"] = differences.table()
    try:
        differences.check(limit)
        if evaluate is not None:
            report["data"] = evaluate(family, run)
        if bench:
            report["latency"] = _latencies(family, run)
        (folder / DESCRIPTION).write_text(json.dumps({**description, "checked": True}, indent=1))
    except ExportError as error:
        report["error"] = str(error)
        raise
    finally:
        write_report(report, folder)
    return report


def format_module(format: str) -> ModuleType:
    """Return the module of a format, whose packages are installed."""
    module = importlib.import_module(f"visdet.export.formats.{format}")
    missing = [name for name in module.PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"format {format!r} needs {', '.join(missing)}, not installed here, to write the model and to check it: "
            "pip install 'visdet-ops[export]'"
        )
    return module


def _latencies(family: Family, run: Run) -> dict[str, Any]:
    given = next(family.cases())[0]
    calls = {"exported": lambda: run(given), "model": lambda: family.run(given)}
    if family.device.type == "cuda":
        calls["model by graphs"] = graphed(family, given)
    times = {name: latencies(call, len(next(iter(given.values())))) for name, call in calls.items()}
    return {**times, "threads": torch.get_num_threads(), "device": str(family.device)}


def _description(
    family: Family,
    dynamic: Mapping[str, Any],
    ranges: Mapping[str, tuple[int, int]],
    format: str,
    precision: str,
    classes: Sequence[str] | None,
    preprocessing: Any,
) -> dict[str, Any]:
    return {
        "model": type(family.model).__name__,
        "format": format,
        "precision": precision,
        "inputs": {
            name: {
                "type": str(tensor.dtype).removeprefix("torch."),
                "shape": [dynamic.get(name, {}).get(axis, size) for axis, size in enumerate(tensor.shape)],
                "meaning": family.about.get(name, ""),
            }
            for name, tensor in next(family.cases())[0].items()
        },
        "ranges": dict(ranges),
        "outputs": {name: family.about.get(name, "") for name in family.output_names},
        "states": dict(family.states),
        "preprocessing": preprocessing,
        "classes": list(classes) if classes is not None else None,
        "versions": {
            "visdet": visdet.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
