"""Whether an ONNX graph that another program has written gives what a model in torch gives, on pictures.

The outputs are compared as sets of detections, and where they differ, the first tensor of the graph that differs is
found. :mod:`.exposed_graph` runs the graph, :mod:`.reference` the model, and :mod:`.counterparts` says which tensors of
the two are the same.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from visdet.errors import check_choice
from visdet.files.images import open_image, turned
from visdet.registry import METRICS
from visdet.structures.coco_json import load_coco_json

from .check import Arrays, Differences, arrays
from .counterparts import counterparts, nearest_of_shape, nearness
from .errors import ExportError
from .exposed_graph import RUNTIMES, ExposedGraph, source_of
from .families.family import Tensors, seeded
from .precision import LIMITS, Tolerance
from .reference import Reference, Size, reference

_TIMES_ROUNDING = 10  # Many operators round, and not the inputs alone.
_GREATEST_LIMIT = 1e-2
Picture = tuple[Any, str | Path]  # the id of an image, and its file


def check_graph(
    graph: str | Path,
    model: Sequence[str] | Reference,
    pictures: Mapping[Any, str | Path],
    annotations: str | Path | None = None,
    runtime: str = "onnxruntime",
    limit: float = 1e-4,
) -> dict[str, Any]:
    """Compare an ONNX graph with a model on pictures. This is the command ``visdet check-export``.

    Args:
        graph: the ONNX file.
        model: the model, or its names as in :func:`~visdet.export.reference.reference`. Its inputs and outputs are
            those of the graph of the same names or, if the graph has other names, in the same order.
        pictures: image files by their ids.
        annotations: an annotation file of COCO, which has these ids, or None. With it, metrics are compared, too.
        runtime: 'onnxruntime', 'openvino' as it opens a file without options, or 'openvino-f32'.
        limit: the greatest difference of an output relative to its largest number. If the model's own
            outputs change by more than a tenth of that where its inputs change in their last bit, the limit is ten
            times this change, but at most 0.01.

    Returns:
        ``differences`` of the outputs and, with annotations, the ``metrics`` of ``model`` and ``graph``.

    Raises:
        ExportError: the graph cannot be run or gives other results. The message names the first node that differs.
        UserError: an argument cannot be used.
    """
    check_choice("runtime", runtime, tuple(RUNTIMES))
    exposed = ExposedGraph(graph)
    size = exposed.image_size
    if not isinstance(model, Reference):
        model = reference(model, size, exposed.takes_picture)
    comparison = _Comparison(exposed, model, runtime, limit)
    metrics = None if annotations is None else _Metrics(str(annotations), model)
    for group in _groups(list(pictures.items()), exposed.batch):
        opened = [_opened(path) for _, path in group]
        inputs = model.inputs(opened, size)
        expected, found = comparison.add(inputs)
        if metrics is not None:
            sizes = [(picture.height, picture.width) for picture in opened]
            metrics.add("model", group, expected, sizes)
            metrics.add("graph", group, found, sizes)
    report: dict[str, Any] = {"differences": comparison.differences.table()}
    problems: list[str] = []
    if metrics is not None:
        report["metrics"], problems = metrics.compared()
    try:
        comparison.allow_for_rounding()
        comparison.differences.check(comparison.limit)
    except ExportError as error:
        problems = [str(error), comparison.beginning(), *problems]
    if problems:
        raise ExportError("\n".join(problems))
    return report


class _Comparison:
    """The outputs of a graph and of a model, and the inputs for which they differ most.

    Attributes:
        differences: those of all inputs. limit: the greatest ones that are allowed.
        names: the outputs of the model by those of the graph.
        worst, given, expected: the inputs for which the outputs differ most, as the model and as the graph is given
            them, and the outputs of the model.
    """

    names: dict[str, str]
    worst: Tensors
    given: Arrays
    expected: Arrays

    def __init__(self, graph: ExposedGraph, model: Reference, runtime: str, limit: float) -> None:
        self.graph = graph
        self.model = model
        self.runtime = runtime
        self.limit = Tolerance(limit, LIMITS["float32"].loss, of_the_mean=False)
        self.run = graph.function(runtime)
        self.differences = Differences()

    def add(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """Compare the outputs for some inputs, and return those of the model and of the graph by the model's names."""
        differences = self.differences
        outputs = self._outputs(inputs)
        expected = arrays(outputs)
        given = self._given(inputs)
        found = self._named(self.run(given))
        before = differences.most
        self._compare(expected, found, differences)
        if differences.most > before:
            self.worst = inputs
            self.given = given
            self.expected = expected
        return outputs, {name: torch.from_numpy(value) for name, value in found.items()}

    def allow_for_rounding(self) -> None:
        """Raise the limit, up to ``_GREATEST_LIMIT``, where the model itself turns rounding into larger differences.

        It becomes ten times the change of the model's outputs if its inputs change in their last bit.
        """
        limit = self.limit.difference
        if self.differences.most <= limit:
            return
        nudged = dict(self.worst)
        generator = seeded()
        for name, value in self.worst.items():
            if value.is_floating_point():
                nudged[name] = value.nextafter(torch.randn(value.shape, generator=generator) * torch.inf)
        rounding = Differences()
        self._compare(self.expected, arrays(self._outputs(nudged)), rounding)
        allowed = min(_TIMES_ROUNDING * rounding.most, _GREATEST_LIMIT)
        self.limit = self.limit._replace(difference=max(limit, allowed))

    def beginning(self) -> str:
        """Return where the outputs begin to differ."""
        run = partial(self.model.run, self.worst)
        limit = self.limit.difference
        function_of = partial(self.graph.function, is_exposed=True)
        found = function_of("onnxruntime")(self.given)
        if wrong := self._wrong(found):
            near = counterparts(run, found, limit)
            node, tensor, text = self._first(found, near, wrong)
            after = max((near[name].number for name in node.input if name in near), default=0)
            one = nearest_of_shape(run, found[tensor], after)
            if one is None:
                return f"{text}. The model computes no tensor of this shape after them"
            place = f" in {one.module}" if one.module else ""
            return f"{text}. The model's nearest is of {one.operator}{place}, up to {one.largest:.3g} apart"
        right = "without optimisations, onnxruntime stays within the limit"
        runtime = self.runtime
        if runtime == "onnxruntime":
            return right
        theirs = function_of(runtime)(self.given)
        wrong = self._wrong(theirs)
        if not wrong:
            return f"{right}, and so does {runtime} with all tensors as outputs"
        common = found.keys() & theirs.keys()
        same = {name for name in common if nearness(found[name], theirs[name])[0] <= limit}
        _, tensor, text = self._first({name: theirs[name] for name in common}, same, wrong)
        _, largest = nearness(found[tensor], theirs[tensor])
        return f"{right}. In {runtime}, {text}, up to {largest:.3g} from that in onnxruntime"

    def _first(self, values: Arrays, same: Collection[str], wrong: Sequence[str]) -> tuple[Any, str, str]:
        """Return the node at which some outputs begin to differ, its tensor, and a text on them.

        Args:
            values: the tensors of the graph. same: the names of those that are right. wrong: those of the outputs.
        """
        graph = self.graph
        node = graph.first_of([name for name in graph.of_images if name not in same], wrong)
        tensor = next(name for name in node.output if name in values and (name in wrong or name not in same))
        text = f"the first tensor that differs is {tensor} {list(values[tensor].shape)} of node {_told(node)}"
        if source := source_of(node):
            text += f", from {source}"
        if before := graph.computing(node):
            text += f", whose inputs are those of {' and '.join(map(_told, before))}"
        return node, tensor, text

    def _outputs(self, inputs: Tensors) -> Tensors:
        """Return the outputs of the model that the graph has."""
        outputs = self.model.outputs(inputs)
        self.names = _paired(self.graph.outputs, list(outputs), "outputs")
        return {name: outputs[name] for name in self.names.values()}

    def _named(self, found: Arrays) -> Arrays:
        """Return the outputs of the graph by the model's names."""
        return {name: found[own] for own, name in self.names.items()}

    def _given(self, inputs: Tensors) -> Arrays:
        names = _paired(list(self.graph.inputs), list(inputs), "inputs")
        values = arrays(inputs)
        return {own: values[name].astype(self.graph.type_of(own)) for own, name in names.items()}

    def _wrong(self, found: Arrays) -> list[str]:
        """Return the outputs of the graph, for the inputs that are known to differ, which differ both as sets of rows
        and number by number.
        """
        theirs = self._named(found)
        as_rows = Differences()
        as_numbers = Differences()
        self._compare(self.expected, theirs, as_rows)
        as_numbers.add(self.expected, theirs, {}, self.limit)
        limit = self.limit.difference
        wrong = {name.split(":")[0] for name, value in as_rows.largest.items() if value > limit}
        return [own for own, name in self.names.items() if name in wrong and as_numbers.largest[name] > limit]

    def _compare(self, expected: Arrays, found: Arrays, differences: Differences) -> None:
        expected = _as_columns(expected)
        found = _as_columns(found)
        differences.add(expected, found, _rows(expected), self.limit)


def _told(node: Any) -> str:
    return f"{node.name} ({node.op_type})"


def _as_columns(outputs: Arrays) -> Arrays:
    """Return the outputs, those alone of a tensor [B, K, 4 + C] as boxes and scores."""
    if len(outputs) == 1:
        ((name, value),) = outputs.items()
        if value.ndim == 3 and value.shape[-1] > 4:
            return {f"{name}:boxes": value[..., :4], f"{name}:scores": value[..., 4:]}
    return outputs


def _rows(outputs: Arrays) -> dict[str, tuple[str, ...]]:
    """Return the outputs that are sets of detections, by the name of their scores: boxes [B, K, 4] and what has K."""
    boxes = [name for name, value in outputs.items() if value.ndim == 3 and value.shape[-1] == 4]
    for name in sorted(boxes, key=lambda name: "box" not in name)[:1]:
        group = [
            other
            for other, value in outputs.items()
            if value.shape[:2] == outputs[name].shape[:2] and value.ndim < 4
        ]
        scores = [other for other in group if other != name and outputs[other].dtype.kind == "f"]
        if scores:
            return {scores[0]: tuple(group)}
    return {}


def _paired(names: list[str], others: list[str], what: str) -> dict[str, str]:
    """Return the names of the model by those of the graph: the same ones, and the others in their order."""
    free = [other for other in others if other not in names]
    new = [name for name in names if name not in others]
    if len(new) > len(free):
        raise ExportError(f"the graph has the {what} {names}, but the model has only {others}")
    return {name: name for name in names if name in others} | dict(zip(new, free, strict=False))


def _opened(path: str | Path) -> Image.Image:
    with open_image(path) as image:
        return turned(image, is_shown=True).convert("RGB")


def _groups(pictures: list[Picture], batch: int | None) -> Iterator[list[Picture]]:
    """Yield groups of as many pictures as a graph takes. If that is any number, it is one and then two."""
    if batch is None:
        yield pictures[:1]
        pictures = pictures[1:]
    size = batch or 2
    for start in range(0, len(pictures), size):
        group = pictures[start : start + size]
        yield group + group[-1:] * ((batch or 0) - len(group))


class _Metrics:
    """The metrics of the model and of the graph."""

    def __init__(self, annotations: str, model: Reference) -> None:
        if model.detections is None:
            raise ExportError("annotations need a Reference with detections, which has none")
        self.detections = model.detections
        categories = sorted(load_coco_json(annotations)["categories"], key=lambda category: category["id"])
        classes = model.classes or [category["name"] for category in categories]
        self.metrics = {}
        for name in ("model", "graph"):
            self.metrics[name] = METRICS.build({"type": "CocoMetric", "ann_file": annotations})
            self.metrics[name].dataset_meta = {"classes": classes}

    def add(self, name: str, group: list[Picture], outputs: Tensors, sizes: list[Size]) -> None:
        """Add the outputs for a group of pictures, whose (height, width) are given."""
        found = self.detections(outputs, sizes)
        samples = []
        for (number, path), one in zip(group, found, strict=True):
            samples.append({"img_id": number, "img_path": str(path), "pred_instances": one})
        self.metrics[name].process({}, samples)

    def compared(self) -> tuple[dict[str, Any], list[str]]:
        """Return the metrics, and what is wrong with them."""
        found = {name: metric.evaluate(0) for name, metric in self.metrics.items()}
        name = "coco/bbox_mAP"
        ours = found["model"][name]
        theirs = found["graph"][name]
        is_lost = ours - theirs > LIMITS["float32"].loss
        return found, [
            f"{name} of the graph is {theirs:.4f}, that of the model {ours:.4f}"
        ] if is_lost else []
