"""The models in torch that a graph of another program is compared with."""

import os
import pkgutil
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mmengine.dataset import pseudo_collate
from PIL import Image
from torch import Tensor, nn

from visdet.engine.checkpoints.held_config import load_config, names_checkpoint
from visdet.engine.config.load import dataset_config
from visdet.engine.inference.detector import init_detector
from visdet.engine.inference.given_images import GivenImage
from visdet.errors import InvalidInputError, MissingFileError, MissingPackageError
from visdet.execution.tensor_tree import tensors_of

from .families import family_of
from .families.family import Tensors
from .families.pictures import Steps
from .standard_operators import standard_operators

Size = tuple[int, int]


@dataclass(frozen=True)
class Reference:
    """A model in torch with the steps before and after it.

    Attributes:
        run: the model, a function of named tensors. It returns tensors, in lists, tuples and dicts or alone. Its
            parameters need no gradients.
        prepare: returns the named inputs for pictures, PIL images in RGB. The second argument is the (height, width)
            that the graph takes, or None if it takes any. Without it, pictures are resized to that, or to the size of
            the first one, and are float32 [B, 3, H, W] from 0 to 1.
        detections: returns for each picture a dict of ``bboxes`` [N, 4], (x1, y1, x2, y2) in pixels of the picture,
            ``scores`` [N] and ``labels`` [N], from named outputs and the (height, width) of the pictures. Without it,
            there are no metrics.
        classes: the names of the labels, or None if they are the categories of the annotations in their order.
    """

    run: Callable[[Tensors], Any]
    prepare: Callable[[Sequence[Image.Image], Size | None], Tensors] | None = None
    detections: Callable[[Tensors, list[Size]], list[dict[str, Tensor]]] | None = None
    classes: Sequence[str] | None = None

    def inputs(self, pictures: Sequence[Image.Image], size: Size | None) -> Tensors:
        """Return the named inputs for pictures."""
        return (self.prepare or _resized)(pictures, size)

    @torch.no_grad()
    def outputs(self, inputs: Tensors) -> Tensors:
        """Return the tensors that the model returns, by their keys, or else their places."""
        match self.run(inputs):
            case Mapping() as found:
                pass
            case list() | tuple() as several:
                found = dict(enumerate(several))
            case alone:
                found = {0: alone}
        outputs = {}
        for key, value in found.items():
            for number, tensor in enumerate(tensors_of(value)):
                outputs[f"{key}.{number}" if number else str(key)] = tensor
        return outputs


def reference(names: Sequence[str], size: Size | None = None, takes_picture: bool = False) -> Reference:
    """Return the model that the option ``--model`` names.

    Args:
        names: ``hf:FOLDER`` of transformers; or a config and a checkpoint, or a checkpoint that holds its config; or
            ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``, a function without arguments that returns a
            :class:`Reference`, or a module in torch that takes the pictures.
        size: the (height, width) that the graph takes, or None if it takes any.
        takes_picture: whether the graph of a config takes a picture as it is decoded, and has the steps before the
            model with the canvas of the config.

    Raises:
        UserError: there is no such model.
    """
    first = names[0]
    if first.startswith("hf:"):
        return _of_transformers(first.removeprefix("hf:"))
    if len(names) == 2 or names_checkpoint(first):
        return _of_config(first, names[-1], size, takes_picture)
    place, _, function = first.rpartition(":")
    if not place or not function.isidentifier():
        raise InvalidInputError(
            f"--model must be hf:FOLDER, CONFIG CHECKPOINT, MODULE:FUNCTION or FILE.py:FUNCTION, got {first!r}"
        )
    found = runpy.run_path(place) if place.endswith(".py") else vars(pkgutil.resolve_name(place))
    if function not in found:
        raise InvalidInputError(f"--model {first}: {place} has no function {function}")
    model: Any = found[function]()
    if isinstance(model, Reference):
        return model
    if isinstance(model, nn.Module):
        model.eval().requires_grad_(False)
    return Reference(lambda inputs: model(*inputs.values()))


def _resized(pictures: Sequence[Image.Image], size: Size | None) -> Tensors:
    height, width = size or (pictures[0].height, pictures[0].width)
    arrays = [np.asarray(picture.resize((width, height))) for picture in pictures]
    return {"images": torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255}


def _of_transformers(folder: str) -> Reference:
    try:
        from transformers import AutoImageProcessor, AutoModelForObjectDetection
    except ImportError as error:
        raise MissingPackageError("--model hf:FOLDER needs transformers, which is not installed") from error
    if not os.path.isdir(folder):
        raise MissingFileError(f"--model hf:{folder}: there is no such folder; nothing is downloaded")
    model: Any = AutoModelForObjectDetection.from_pretrained(folder).eval().requires_grad_(False)
    processor: Any = AutoImageProcessor.from_pretrained(folder)

    def prepare(pictures: Sequence[Image.Image], size: Size | None) -> Tensors:
        fixed: dict[str, Any] = {"size": {"height": size[0], "width": size[1]}} if size else {}
        return dict(processor(list(pictures), return_tensors="pt", **fixed))

    def detections(outputs: Tensors, sizes: list[Size]) -> list[dict[str, Tensor]]:
        found = processor.post_process_object_detection(
            SimpleNamespace(**outputs), threshold=0.0, target_sizes=sizes
        )
        return [{"bboxes": one["boxes"], "scores": one["scores"], "labels": one["labels"]} for one in found]

    labels = model.config.id2label
    names = [labels[label] for label in sorted(labels)]
    is_named = names != [f"LABEL_{label}" for label in range(len(names))]
    return Reference(lambda inputs: model(**inputs), prepare, detections, names if is_named else None)


def _of_config(config: str, checkpoint: str, size: Size | None, takes_picture: bool) -> Reference:
    cfg, _ = load_config(config)
    detector = init_detector(cfg, checkpoint, "cpu")
    steps = Steps.of(dataset_config(cfg, "test").get("pipeline") or ()) if takes_picture else None
    family = family_of(detector.model, size, None, steps)
    batch: dict[str, Any] = {}

    def prepare(pictures: Sequence[Image.Image], _: Size | None) -> Tensors:
        items = [detector.item_of(GivenImage(pixels=np.asarray(picture))) for picture in pictures]
        batch.update(family.model.data_preprocessor(pseudo_collate(items), False))
        if takes_picture:
            return {"picture": torch.from_numpy(np.array(pictures[0]))}
        return family.inputs_of(batch["inputs"], batch["data_samples"])

    def run(inputs: Tensors) -> Tensors:
        with standard_operators(family, None):
            return family.run(inputs)

    def detections(outputs: Tensors, _: list[Size]) -> list[dict[str, Tensor]]:
        samples = family.samples_of(outputs, batch["data_samples"])
        return [dict(sample.pred_instances.items()) for sample in samples]

    return Reference(run, prepare, detections, detector.dataset_meta["classes"])
