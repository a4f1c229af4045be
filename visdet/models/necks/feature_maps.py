"""The check of the feature maps that a neck is given."""

from collections.abc import Sequence

from torch import Tensor

from visdet.errors import InvalidInputError

__all__ = ["check_feature_maps"]


def check_feature_maps(neck: str, inputs: Sequence[Tensor], in_channels: Sequence[int]) -> None:
    """Raise an InvalidInputError unless the maps [B, C_l, H_l, W_l] have the channels that a neck was built for."""
    given = [level.shape[1] for level in inputs]
    if given != list(in_channels):
        raise InvalidInputError(
            f"{neck}: in_channels is {list(in_channels)}, but the feature maps have {given} channels"
        )
