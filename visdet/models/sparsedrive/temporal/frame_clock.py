"""When and where the frames of a batch were taken, and what lies between two of them."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visdet.errors import InvalidInputError

from ...transfer import to_device
from .plain_values import temporal_value


@dataclass(frozen=True)
class FrameStep:
    """What lies between the previous frame of each sample and the current one.

    Attributes:
        seconds: [B], the time between the frames.
        previous_to_current: [B, 4, 4] float64, from the coordinates of the previous frame to those of the current one.
        same_scene: [B], whether both frames are of one scene, as far as that is known.
    """

    seconds: tuple[float, ...]
    previous_to_current: Tensor
    same_scene: tuple[bool, ...]

    def entered(
        self, max_time_interval: float, default_interval: float, device: torch.device, dtype: torch.dtype
    ) -> tuple["DeviceStep", tuple[bool, ...]]:
        """Return the step on the device, and for each sample whether the previous frame counts.

        Args:
            max_time_interval, default_interval: see :func:`counted_step`. device, dtype: of the numbers.
        """
        # The host computes with numpy, whose functions take a fraction of the time of torch's for so few numbers.
        seconds = np.array(self.seconds)
        matrices = self.previous_to_current.numpy()
        is_continued, interval, velocity = counted_step(
            np.where, seconds, matrices, np.array(self.same_scene), max_time_interval, default_interval
        )
        rows = np.column_stack(
            (matrices.reshape(len(seconds), 16), seconds, interval, is_continued, velocity)
        )
        matrix, times, speed = to_device(torch.from_numpy(rows), device, dtype).split([16, 3, 2], dim=1)
        elapsed, intervals, continued = times.unbind(1)
        step = DeviceStep(matrix.unflatten(1, (4, 4)), elapsed, intervals, continued > 0.5, speed)
        return step, tuple(is_continued.tolist())


def counted_step(
    where: Callable[..., Any],
    seconds: Any,
    previous_to_current: Any,
    same_scene: Any,
    max_time_interval: float,
    default_interval: float,
) -> tuple[Any, Any, Any]:
    """Return [B] whether the previous frame counts, [B] the interval, and [B, 2] the velocity of the vehicle.

    The previous frame counts if it is of the same scene and not too far away in time. The velocity is in the vehicle's
    own coordinates, and zero without an interval.

    Args:
        where: ``numpy.where`` for arrays, ``torch.where`` for tensors.
        seconds, same_scene: [B]. previous_to_current: [B, 4, 4].
        max_time_interval: the longest time in seconds between two frames of a sequence.
        default_interval: the interval in seconds if the previous frame does not count.
    """
    is_continued = same_scene & (abs(seconds) <= max_time_interval)
    has_passed = seconds != 0
    interval = where(is_continued & has_passed, seconds, default_interval)
    moved = -previous_to_current[:, :2, 3]  # The translation is the place of the previous origin.
    divisor = where(has_passed, seconds, 1.0)[:, None]
    return is_continued, interval, where(has_passed[:, None], moved / divisor, 0.0)


@temporal_value
@dataclass(frozen=True)
class DeviceStep:
    """What the device must know of the step from the previous frame of each sample to the current one.

    Attributes:
        previous_to_current: [B, 4, 4], from the coordinates of the previous frame to those of the current one.
        seconds: [B], the time between the frames.
        interval: [B], the same, or a default if the previous frame does not count.
        is_continued: [B] bool, whether the previous frame counts.
        velocity: [B, 2], the velocity of the vehicle in its own coordinates, in metres per second.
    """

    previous_to_current: Tensor
    seconds: Tensor
    interval: Tensor
    is_continued: Tensor
    velocity: Tensor


@temporal_value
@dataclass(frozen=True)
class FrameClock:
    """The time and pose of each sample's frame, on the host and in float64.

    Attributes:
        timestamp: [B] in seconds. to_world, from_world: [B, 4, 4].
        scene: [B] tokens of the scenes, None where a scene is unknown.
    """

    timestamp: tuple[float, ...]
    to_world: Tensor
    from_world: Tensor
    scene: tuple[str | None, ...]

    @classmethod
    def of(cls, metas: dict[str, Any]) -> "FrameClock":
        """Return the clock of a batch.

        Args:
            metas: ``timestamp`` [B] in seconds, and ``img_metas``, one dict per sample with ``T_global`` and
                ``T_global_inv`` [4, 4], and with ``scene_token`` if it is known.

        Raises:
            ValueError: there is no time, or a time or a pose is not finite.
        """
        samples: Sequence[dict[str, Any]] = metas["img_metas"]
        if "timestamp" not in metas:
            raise InvalidInputError("FrameClock: metas must hold timestamp [B] in seconds")
        clock = cls(
            timestamp=tuple(torch.as_tensor(metas["timestamp"]).tolist()),  # The host may wait for it.
            to_world=_poses(samples, "T_global"),
            from_world=_poses(samples, "T_global_inv"),
            scene=tuple(sample.get("scene_token") for sample in samples),
        )
        numbers = np.append(clock.to_world, clock.timestamp)
        if not np.isfinite(numbers).all():
            raise InvalidInputError("FrameClock: timestamps and T_global must be finite numbers")
        return clock

    def since(self, previous: "FrameClock | None") -> FrameStep | None:
        """Return what lies between the frames ``previous`` and these, or None if there are not as many before."""
        if previous is None:
            return None
        times = self.timestamp
        earlier = previous.timestamp
        if len(earlier) != len(times):
            return None
        return FrameStep(
            seconds=tuple(map(operator.sub, times, earlier)),
            previous_to_current=torch.from_numpy(self.from_world.numpy() @ previous.to_world.numpy()),
            same_scene=tuple(
                now is None or then is None or now == then
                for now, then in zip(self.scene, previous.scene, strict=True)
            ),
        )


def _poses(samples: Sequence[dict[str, Any]], name: str) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(sample[name], dtype=np.float64) for sample in samples]))
