"""Average precision where each prediction may only be matched with the one true object that it is closest to."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .precision_recall import Found, joined


class Nearest(NamedTuple):
    """The predictions of all images, the highest score first, each with the closest true object of its class.

    Attributes:
        predicted, scores: [m], their classes and scores.
        closeness: [m], to that object, or -inf if none can be matched.
        truths: [m], the position of that among all true objects. It has no meaning where the closeness is -inf.
        is_on_crowd: bool [m], whether that need not be found. Predictions on such an object do not count.
    """

    predicted: np.ndarray
    scores: np.ndarray
    closeness: np.ndarray
    truths: np.ndarray
    is_on_crowd: np.ndarray

    @classmethod
    def of(cls, images: Sequence[Found]) -> "Nearest":
        """Return the predictions of images or frames."""
        no_numbers = np.zeros(0)
        no_positions = np.zeros(0, int)
        columns = [(no_positions, no_numbers, no_numbers, no_positions, np.zeros(0, bool))]
        num_before = 0
        never = -np.inf
        for image in images:
            predicted = image.predicted
            labels = image.labels
            closeness = np.where(predicted[:, None] == labels, image.closeness(), never)
            # There is a closest one.
            closeness = np.pad(closeness, ((0, 0), (0, 1)), constant_values=never)
            truths = closeness.argmax(axis=1)
            is_crowd = np.append(image.is_crowd, False)
            columns.append(
                (predicted, image.scores, closeness.max(axis=1), num_before + truths, is_crowd[truths])
            )
            num_before += len(labels)
        found = cls(*joined(columns))
        order = np.argsort(-found.scores, kind="stable")
        return cls(*(column[order] for column in found))

    def are_right(self, is_near: np.ndarray) -> np.ndarray:
        """Return whether each prediction is the first one that is near its object, bool [m].

        Args:
            is_near: bool [m], whether the objects are close enough.
        """
        near = np.flatnonzero(is_near)
        right = np.zeros_like(is_near)
        right[near[np.unique(self.truths[near], return_index=True)[1]]] = True
        return right

    def precisions(
        self, is_near: np.ndarray, num_truths: Sequence[int], recalls: np.ndarray | None = None
    ) -> list[float]:
        """Return the AP of each class; see :func:`interpolated_precision`.

        Args:
            is_near: see :meth:`are_right`. num_truths: the number of true objects of each class, without crowds.
            recalls: see :func:`interpolated_precision`.
        """
        right = self.are_right(is_near)
        counts = ~(is_near & self.is_on_crowd)
        precisions = []
        for label, number in enumerate(num_truths):
            of_class = right[counts & (self.predicted == label)]
            precisions.append(interpolated_precision(of_class, number, recalls))
        return precisions


def interpolated_precision(is_right: np.ndarray, num_truths: int, recalls: np.ndarray | None = None) -> float:
    """Return the mean precision of predictions of one class, where that of a recall is the greatest at or above it.

    Args:
        is_right: bool [m], the highest score first. num_truths: the number of true objects. Without any, the AP is 0.
        recalls: those over which the mean is taken. By default it is the area under the whole curve.
    """
    right = np.cumsum(is_right)
    recall = right / max(num_truths, 1)
    precision = right / np.arange(1, len(right) + 1)
    greatest = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    if recalls is None:
        return float(np.diff(recall, prepend=0) @ greatest[:-1])
    return float(greatest[np.searchsorted(recall, recalls)].mean())
