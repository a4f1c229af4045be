"""Loading of pretrained backbone weights from torchvision or from a file."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from visdet.checks.state_dicts import common_prefix, differing
from visdet.errors import InvalidInputError, UserError, check_choice, listed

_TORCHVISION = "torchvision://"


class PretrainedWeightsError(UserError, RuntimeError):
    """Pretrained weights that are not available, or that belong to another architecture."""


class Backbone(BaseModule):
    """The base class of backbones, whose weights may come from a checkpoint, and whose first parts may be frozen.

    Args:
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` (see ``load_pretrained``) or mmengine's initialisers.
        default: the initialisers of all weights if ``init_cfg`` is None or a checkpoint.
        num_stages: the number of stages. out_indices: the stages to return.
        frozen_stages: the number of stages that are frozen together with what precedes them, or -1.
    """

    def __init__(
        self,
        init_cfg: Any,
        default: list[dict[str, Any]],
        num_stages: int,
        out_indices: Sequence[int],
        frozen_stages: int,
    ) -> None:
        options = dict(init_cfg) if isinstance(init_cfg, dict) else {}
        is_pretrained = options.pop("type", None) == "Pretrained"
        super().__init__(default if is_pretrained or init_cfg is None else init_cfg)
        self.pretrained = options if is_pretrained else None
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        if not all(0 <= index < num_stages for index in self.out_indices):
            raise InvalidInputError(
                f"{type(self).__name__}: out_indices must be stages 0..{num_stages - 1}, got {self.out_indices}"
            )

    def load_pretrained(
        self, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    ) -> None:
        """Load the weights that the config names, if it names any."""
        if self.pretrained is not None:
            load_pretrained(self, convert=convert, **self.pretrained)

    @abstractmethod
    def frozen_parts(self) -> list[nn.Module]:
        """Return the parts that are not trained and do not update their statistics, if any stage is frozen."""

    def freeze(self) -> None:
        """Freeze these parts."""
        if self.frozen_stages >= 0:
            for part in self.frozen_parts():
                part.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> "Backbone":
        """Set the mode. Frozen parts stay in evaluation mode."""
        super().train(mode)
        self.freeze()
        return self


def load_pretrained(
    backbone: nn.Module,
    checkpoint: str,
    prefix: str | None = None,
    map_location: str = "cpu",
    if_unavailable: str = "error",
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> None:
    """Load weights that were pretrained on classification into a backbone.

    The weights of the classifier (``fc.*``) and of stages that were not built are left out. In a config this is
    ``init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50', if_unavailable='random')``.

    Args:
        backbone: the module to fill, with torchvision's parameter names.
        checkpoint: ``'torchvision://resnet50'`` (ImageNet-1k, the original recipe), ``'torchvision://resnet50.IMAGENET1K_V2'``,
            or the path or URL of a state dict, which may be under the key ``state_dict``, or its name in a list of
            mmengine, such as ``'open-mmlab://detectron2/resnet50_caffe'``.
        prefix: use only the entries under this prefix, e.g. ``'backbone.'``, and remove it.
        map_location: the device that the file is read to.
        if_unavailable: 'error', or 'random' to warn and keep the random initialisation if the weights can be neither
            found nor downloaded.
        convert: a function that gives the state dict the backbone's names.

    Raises:
        PretrainedWeightsError: the weights are not available and ``if_unavailable`` is 'error', or they belong to
            another architecture.
    """
    check_choice("init_cfg: if_unavailable", if_unavailable, ("error", "random"))
    is_of_torchvision = checkpoint.startswith(_TORCHVISION)
    try:
        if is_of_torchvision:
            state_dict = _torchvision_state(checkpoint)
        else:
            contents = CheckpointLoader.load_checkpoint(
                checkpoint, map_location=map_location, logger="silent"
            )
            parts = (contents.get(key) for key in ("state_dict", "model"))
            state_dict = next((part for part in parts if isinstance(part, dict)), contents)
    except (OSError, HTTPException) as error:  # The file is missing, or the network fails.
        url = _torchvision_weights(checkpoint).url if is_of_torchvision else checkpoint
        how = "Give the path of a file that exists as checkpoint"
        if "://" in url:
            how = f"Download {url} on a machine with a network, and give the path of the file as checkpoint"
        message = (
            f"pretrained weights {checkpoint!r} of {type(backbone).__name__} are not available ({error}). "
            f"{how} in its init_cfg (of a detector's backbone: --cfg-options "
            "model.backbone.init_cfg.checkpoint=PATH)"
        )
        if if_unavailable == "error":
            raise PretrainedWeightsError(
                f"{message}. To start from random weights instead, set if_unavailable='random' in the init_cfg "
                "(model.backbone.init_cfg.if_unavailable=random)"
            ) from error
        print_log(
            f"{message}. The backbone STARTS FROM RANDOM WEIGHTS.", logger="current", level=logging.WARNING
        )
        return
    if prefix is not None:
        prefix = prefix.rstrip(".") + "."
        state_dict = {
            key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)
        }
    _fill(backbone, state_dict if convert is None else convert(state_dict), checkpoint)


def _torchvision_weights(checkpoint: str) -> Any:
    """Return torchvision's weights entry for ``'torchvision://model'`` or ``'torchvision://model.variant'``."""
    from torchvision.models import get_model_weights

    model_name, _, variant = checkpoint[len(_TORCHVISION) :].partition(".")
    weights = get_model_weights(model_name)
    return weights[variant] if variant else next(iter(weights))


def _torchvision_state(checkpoint: str) -> dict[str, Tensor]:
    """Return the weights of a name of torchvision, which are downloaded or in the cache of ``torch.hub``."""
    weights = _torchvision_weights(checkpoint)
    try:
        return weights.get_state_dict(progress=False, check_hash=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        cached = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
        advice = f"Remove {cached}, so that it is downloaded again" if cached.exists() else "Try again"
        raise PretrainedWeightsError(
            f"pretrained weights {checkpoint!r} are damaged ({str(error)[:200]}). {advice}"
        ) from error


def _fill(backbone: nn.Module, state_dict: dict[str, Tensor], checkpoint: str) -> None:
    own = backbone.state_dict()
    kind = type(backbone).__name__
    missing = [key for key in own if key not in state_dict and not key.endswith("num_batches_tracked")]
    reshaped, retyped = (found.values() for found in differing(state_dict, own))
    # The file may hold stages that were not built. A surplus block within a stage means another depth.
    stages = {key.split(".")[0] for key in own}
    surplus = [key for key in state_dict if key not in own and key.split(".")[0] in stages]
    wrong = {
        "missing": missing,
        "other shape": reshaped,
        "other type": retyped,
        "surplus": surplus,
    }
    details = "; ".join(f"{label}: {listed(keys, 3)}" for label, keys in wrong.items() if keys)
    if details:
        if prefix := common_prefix(state_dict, own):
            details += f". Its keys begin with {prefix!r}, which prefix={prefix!r} in the init_cfg removes"
        raise PretrainedWeightsError(
            f"pretrained weights {checkpoint!r} do not fit the {kind} of this config: {details}"
        )
    backbone.load_state_dict({key: state_dict[key] for key in own if key in state_dict}, strict=False)
    print_log(f"loaded {checkpoint!r} into {kind}", logger="current")
