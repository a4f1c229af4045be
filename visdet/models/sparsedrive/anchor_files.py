"""Anchors that are read from files, or that a checkpoint provides later."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.model import BaseModule
from torch import Tensor

from visdet.checks.array_files import load_array
from visdet.checks.finite import check_finite
from visdet.errors import MissingFileError


class ModuleWithAnchors(BaseModule):
    """A module with anchors from .npy files.

    While a file is missing, its anchors are zeros, which a checkpoint replaces.

    Attributes:
        missing_anchor_files: {name of the anchors' parameter: path of the missing file}.
    """

    def __init__(self, init_cfg: dict[str, Any] | None = None) -> None:
        super().__init__(init_cfg)
        self.missing_anchor_files: dict[str, str] = {}

    def read_anchors(self, name: str, given: Any, placeholder_shape: Sequence[int]) -> Tensor:
        """Return anchors in float32, from numbers or a .npy file.

        Args:
            name: the name of the parameter that will hold the anchors.
            given: the numbers, or the path of the file.
            placeholder_shape: the shape of the zeros that stand in for a missing file.
        """
        if isinstance(given, (str, Path)):
            if Path(given).exists():
                file = given
                given = load_array(given)
                check_finite(str(file), **{name: given})
            else:
                self.missing_anchor_files[name] = str(given)
                warnings.warn(
                    f"{type(self).__name__}: no {name} file {given}. These anchors are zeros until a checkpoint is "
                    "loaded",
                    stacklevel=3,
                )
                given = np.zeros(placeholder_shape)
        return torch.as_tensor(np.asarray(given), dtype=torch.float32)

    def require_anchors(self) -> None:
        """Raise an error if the module is in training mode while a file is missing.

        Raises:
            FileNotFoundError: a file is missing. The message names it and the tool that makes it.
        """
        missing = self.missing_anchor_files
        if missing and self.training:
            name, path = next(iter(missing.items()))
            raise MissingFileError(
                f"{type(self).__name__}: training needs the {name} file {path}. "
                "Make it with visdet make-anchors, or load a checkpoint"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing = self.missing_anchor_files
        for name in list(missing):
            if f"{prefix}{name}" in state_dict:
                del missing[name]
