"""Frames' samples from the tensors of a batch."""

from visdet.structures import DrivingDataSample


def samples_of(data):
    """Return one DrivingDataSample per dict of ``data["img_metas"]``; ``gt_depth`` is a list of levels."""
    samples = []
    for index, metas in enumerate(data["img_metas"]):
        sample = DrivingDataSample(metainfo=metas)
        for name, values in data.items():
            if name == "gt_depth":
                sample.set_field([level[index] for level in values], name)
            elif name not in ("img_metas", *metas):
                sample.set_field(values[index], name)
        samples.append(sample)
    return samples
