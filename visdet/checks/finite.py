"""The check that numbers are finite, which data sets, metrics and results share."""

from typing import Any

import numpy as np

from visdet.errors import InvalidInputError

DIVERGED = "A model whose training has diverged predicts such numbers"


def check_finite(owner: str, hint: str = "", /, **values: Any) -> None:
    """Raise an error if an array, a tensor or a number is not finite.

    Args:
        owner: what the message begins with, such as the name of a metric and of a sample.
        hint: what the message ends with.
        **values: what is checked, by the name that the message gives it. Of a list or an object array, each item is
            checked. Values other than numbers pass.

    Raises:
        InvalidInputError: a value is NaN or infinite. The message has its name and the place of the first one.
    """
    for name, value in values.items():
        if isinstance(value, list) or str(getattr(value, "dtype", "")) == "object":
            items = {f"{name}[{number}]": item for number, item in enumerate(value)}
            check_finite(owner, hint, **items)
            continue
        is_tensor = hasattr(value, "detach")  # Programs without a model need not import torch for this.
        array = value.double().numpy(force=True) if is_tensor else np.asarray(value)
        if array.dtype.kind not in "fc" or (is_finite := np.isfinite(array)).all():
            continue
        first, *others = np.argwhere(~is_finite).tolist()
        place = f", the first at {first}" if first else ""
        raise InvalidInputError(
            f"{owner}: {name} must be finite, got {1 + len(others)} NaN or infinite numbers{place}"
            + (f". {hint}" if hint else "")
        )
