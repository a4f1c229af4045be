"""The signal that all processes of a run act on, whichever of them it was sent to."""

import torch
from mmengine.dist import all_reduce, get_world_size

from visdet.execution.host_copy import HostCopy


class AgreedSignal:
    """Tells all processes of a signal that one of them has received."""

    def __init__(self) -> None:
        self._heard: HostCopy | None = None

    def hear(self, own: int, device: torch.device) -> int:
        """Return the number of a signal that asks to end the run, or 0. All processes get the same answer.

        They hear of a signal in the next iteration, so that none waits for another or for its GPU.

        Args:
            own: the number of the signal that this process has received, or 0. device: of the process group.
        """
        if get_world_size() == 1:
            return own
        number = torch.full((), float(own), device=device)
        all_reduce(number, "max")
        heard, self._heard = self._heard, HostCopy({"number": number})
        return int(heard.read()["number"]) if heard else 0
