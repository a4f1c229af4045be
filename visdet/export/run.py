"""The order of an export: wrap, trace, write, run, compare, report."""

import importlib
import importlib.util
import io
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

import visdet
from visdet.engine.errors import first_line
from visdet.errors import MissingPackageError, check_choice
from visdet.files.writing import write_atomically

from .check import Run, arrays, compare, graphed, latencies
from .errors import ExportError
from .families import family_of
from .families.family import Family
from .families.pictures import Steps
from .folding import with_folded_norms
from .formats import FORMATS, Format
from .package import checksums, remove_results, write_description
from .precision import LIMITS, Tolerance, with_features_in
from .program import Program
from .report import write_report
from .usage import write_usage


@contextmanager
def _without_remarks(*names: str) -> Iterator[None]:
    """Let loggers tell errors alone within the block: what a graph optimiser skips and where CUDA is are no news."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@_without_remarks("onnxscript", "torch.utils.cpp_extension")
# torch would write the Python of a whole graph again for each part that it moves.
@_use_lazy_graph_module(True)
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
    thresholds: Sequence[float] | None = None,
    origin_of_thresholds: str | None = None,
    steps: Steps | None = None,
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
        thresholds, origin_of_thresholds: for each class, the lowest score of the objects to keep; where they come from.
        steps: the steps before a detector, which become part of the graph. It then takes a picture of any size.
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
    module = format_module(format)
    kind = _checked_format(format, precision, custom_op, has_data=calibration is not None)
    size: Any = shape and tuple(map(int, shape))
    family = family_of(with_features_in(model, precision), size, batch, steps)
    written = with_features_in(with_folded_norms(model), precision)
    program = replace(
        family_of(written, size, batch, steps).program(),
        custom_op=custom_op,
        calibration=calibration(family) if precision == "int8" else None,
    )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    remove_results(folder)
    description = {
        "format": format,
        "precision": precision,
        **_described(family, program),
        "device": family.device.type,
        "preprocessing": preprocessing,
        "classes": classes and list(classes),
        "score_thresholds": thresholds and list(thresholds),
        "origin_of_thresholds": origin_of_thresholds,
        "options": kind.options,
        "checked": False,
    }
    _write(module, program, description, kind, folder)
    report: dict[str, Any] = {
        "format": format,
        "precision": precision,
        "checked": False,
        "bytes": {name: (folder / name).stat().st_size for name in kind.files},
    }
    if not check:
        report["remark"] = "the exported model was not run and not compared (--no-check)"
        write_report(report, folder)
        return report
    _check(module, family, LIMITS[precision], folder, report, evaluate, bench)
    write_description({**description, "checked": True}, folder)  # It comes last.
    return report


def _checked_format(format: str, precision: str, custom_op: str | None, has_data: bool) -> Format:
    """Return the format, which has the precision and the custom operators, or raise an error."""
    check_choice("precision", precision, tuple(LIMITS))
    kind = FORMATS[format]
    if precision not in kind.precisions:
        raise ExportError(
            f"precision {precision!r}: the runtime of format {format!r} has no convolution in it on a CPU. Possible "
            f"are {', '.join(kind.precisions)}"
        )
    if custom_op not in (None, kind.custom_op):
        raise ExportError(f"custom_op must be {kind.custom_op!r} with format {format!r}, got {custom_op!r}")
    if precision == "int8" and (custom_op or not has_data):
        raise ExportError(
            "precision 'int8' needs data with annotations (--check), which give the ranges of numbers and show the "
            "loss, and no custom_op"
        )
    return kind


def _write(
    module: ModuleType, program: Program, description: dict[str, Any], kind: Format, folder: Path
) -> None:
    """Write the model and what describes it, or raise an ExportError that says what torch cannot write."""
    write_description(description, folder)
    try:
        module.write(program, folder)
    except (torch._dynamo.exc.TorchDynamoException, torch.onnx.OnnxExporterError) as error:
        # The first cause has the operator that ONNX lacks.
        reason = (error.__cause__ and error.__cause__.__cause__) or error
        raise ExportError(
            f"torch {torch.__version__} cannot write the model as {description['format']} "
            f"({first_line(reason)}). If the sizes that may change are the reason, fix them (--shape, "
            "--batch); or choose another format, such as pt2"
        ) from error
    write_usage(description, folder)
    description["sha256"] = checksums(folder, kind.files)
    write_description(description, folder)


def _check(
    module: ModuleType,
    family: Family,
    limit: Tolerance,
    folder: Path,
    report: dict[str, Any],
    evaluate: Any,
    bench: bool,
) -> None:
    """Run what was written, compare it with the model, and write the report. Differences are an ExportError."""
    try:
        run: Run = module.load(folder)
        differences, inputs, outputs = compare(family, run, limit)
        given = {f"input.{name}": tensor for name, tensor in inputs.items()}
        found = {f"output.{name}": tensor for name, tensor in outputs.items()}
        content = io.BytesIO()
        np.savez(content, **arrays(given | found))  # type: ignore[arg-type]
        write_atomically(folder / "sample.npz", content.getbuffer())
        report["differences"] = differences.table()
        if options := FORMATS[report["format"]].options:
            plain, _, _ = compare(family, module.load(folder, options={}), limit, leaves_out=False)
            report["without_options"] = {"options": options, "differences": plain.table()}
        differences.check(limit)
        if evaluate is not None:
            report["data"] = evaluate(family, run)
        if bench:
            report["latency"] = _latencies(family, run)
        report["checked"] = True
    except ExportError as error:
        report["error"] = str(error)
        raise
    finally:
        write_report(report, folder)


def format_module(format: str) -> ModuleType:
    """Return the module of a format, whose packages are installed."""
    check_choice("format", format, tuple(FORMATS))
    packages = FORMATS[format].packages
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"format {format!r} needs {', '.join(missing)}, not installed here, to write the model and to check it: "
            "pip install 'visdet-ops[export]'"
        )
    return importlib.import_module(f"visdet.export.formats.{format}")


def _latencies(family: Family, run: Run) -> dict[str, Any]:
    given = next(family.cases())[0]
    batch = family.batch or len(next(iter(given.values())))
    calls: dict[str, Callable[[], Any]] = {
        "exported": partial(run, given),
        "model": partial(family.run, given),
    }
    if family.device.type == "cuda":
        calls["model by graphs"] = graphed(family, given)
    times = {name: latencies(call, batch) for name, call in calls.items()}
    return {**times, "threads": torch.get_num_threads(), "device": str(family.device)}


def _described(family: Family, program: Program) -> dict[str, Any]:
    """Return what ``model.json`` says of the model, its inputs and its outputs."""
    meaning_of = family.about.get
    inputs = {}
    ranges = {}
    for name, tensor in program.inputs.items():
        shape: list[Any] = list(tensor.shape)
        for axis, size in program.dynamic.get(name, {}).items():
            shape[axis] = size.__name__
            ranges[size.__name__] = (size.min, size.max)
        inputs[name] = {
            "type": str(tensor.dtype).removeprefix("torch."),
            "shape": shape,
            "meaning": meaning_of(name, ""),
        }
    return {
        "model": type(family.model).__name__,
        "versions": {
            "visdet": visdet.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "inputs": inputs,
        "ranges": ranges,
        "outputs": {name: meaning_of(name, "") for name in family.output_names},
        "states": family.states,
    }
