"""Make the small golden vectors of tests/data.

``python tests/make_golden.py deformable_detr [FOLDER]``
    runs mmdet's Deformable DETR; needs mmdet 3.3 and mmcv-lite 2.1 (docs/mmcv.md). The sampling operator and the
    focal loss are mmcv's, in plain torch.
``python tests/make_golden_dino.py``
    runs mmdet's DINO in the same environment.
``python tests/make_golden.py sparsedrive [FOLDER]``
    runs visdet's own SparseDrive; only to be done where tests/models/sparsedrive passes on the large vectors, which
    are the original's numbers.

The unit-level cases and the lists of published parameters are those of FOLDER (``../shared/data``), compressed. The
models are configured as the large vectors of FOLDER are. Their weights and images are drawn by ``golden.drawn``, so
that a file holds results alone, and of a long result every n-th number.
"""

import argparse
import copy
import io
import json
import lzma
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from golden import OWN, SHARED, drawn, golden_state

# A result of more numbers than this is sampled.
MOST_NUMBERS = 400


def pack(name: str, arrays: dict[str, np.ndarray]) -> None:
    """Write ``arrays`` as tests/data/golden/NAME.npz.xz."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    path = OWN / "golden" / f"{name}.npz.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(stream.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{path}: {len(arrays)} arrays, {path.stat().st_size / 1024:.0f} KiB")


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / "golden" / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def step_of(size: int) -> int:
    """Return the distance of the stored numbers of a result: 1, or a prime, which is in step with no dimension."""
    step = max(1, -(-size // MOST_NUMBERS))
    while any(step % divisor == 0 for divisor in range(2, step)):
        step += 1
    return step


def store(arrays: dict[str, np.ndarray], name: str, value: object) -> None:
    """Add ``value`` to ``arrays``, sampled where it is long."""
    array = torch.as_tensor(value).detach().numpy()
    if array.dtype == np.float64 and array.size > 1:
        array = array.astype(np.float32)
    step = step_of(array.size)
    arrays[name if step == 1 else f"{name}@{step}"] = array if step == 1 else array.reshape(-1)[::step]


def deformable_detr(folder: Path) -> None:
    """Run mmdet's model in three variants."""
    MODELS = mmdet_models()
    for variant in ("base", "refine", "two_stage"):
        large = read(folder, f"deformable_detr_{variant}")
        config = json.loads(str(large["config"]))
        model = MODELS.build({"type": "DeformableDETR", **config}).eval()
        arrays = {
            key: value for key, value in large.items() if key.startswith("input/") and "images" not in key
        }
        arrays["config"] = large["config"]
        arrays["drawn/input/images"] = np.array(large["input/images"].shape)
        arrays["drawn_gain"] = np.array(2.0)
        if variant == "two_stage":
            # Pixels without a proposal get a logit of zero, so that the best queries come from others.
            for name in ("fc", "norm"):
                arrays[f"state/memory_trans_{name}.bias"] = np.zeros(256, np.float32)
            arrays["state/bbox_head.cls_branches.2.bias"] = np.zeros(5, np.float32)
        model.load_state_dict(golden_state(model, arrays))
        images = torch.from_numpy(2 * drawn("input/images", large["input/images"].shape))
        stored = [key for key in large if key.startswith("grad/")]
        for name, value in mmdet_results(model, images, arrays, stored):
            store(arrays, name, value)
        pack(f"deformable_detr_small_{variant}", arrays)


def mmdet_models() -> object:
    """Return mmdet's registry of models, on visdet's operators."""
    from visdet.compat.mmcv_ops import install

    install()
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules

    register_all_modules(init_default_scope=True)
    return MODELS


def mmdet_samples(arrays: dict[str, np.ndarray], padded: bool, scaled: bool) -> list:
    """Return the samples of the two images in mmdet's form."""
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    samples = []
    for i in range(2):
        sample = DetDataSample()
        shape = tuple(arrays["input/img_shape"][i].tolist()) if padded else (96, 128)
        sample.set_metainfo({"img_shape": shape, "batch_input_shape": (96, 128)})
        sample.set_metainfo(
            {"scale_factor": tuple(arrays["input/scale_factor"][i].tolist()) if scaled else (1.0, 1.0)}
        )
        sample.gt_instances = InstanceData(
            bboxes=torch.from_numpy(arrays[f"input/gt_bboxes/{i}"]),
            labels=torch.from_numpy(arrays[f"input/gt_labels/{i}"]),
        )
        samples.append(sample)
    return samples


def mmdet_results(
    model: torch.nn.Module, images: torch.Tensor, arrays: dict[str, np.ndarray], gradients: list[str]
) -> Iterable[tuple[str, object]]:
    """Yield (name, value) of everything that the large vectors hold of a run."""
    samples = mmdet_samples(arrays, padded=True, scaled=False)
    with torch.no_grad():
        maps = model.backbone(images)
        yield from ((f"output/backbone/{level}", value) for level, value in enumerate(maps))
        maps = model.neck(maps)
        yield from ((f"output/neck/{level}", value) for level, value in enumerate(maps))
        encoder_inputs, decoder_inputs = model.pre_transformer(maps, samples)
        for name in ("feat_pos", "feat_mask", "valid_ratios", "spatial_shapes"):
            yield f"output/pre_transformer/{name}", encoder_inputs[name]
        encoded = model.forward_encoder(**encoder_inputs)
        yield "output/memory", encoded["memory"]
        start, _ = model.pre_decoder(**encoded)
        if model.as_two_stage:
            memory, proposals = model.gen_encoder_output_proposals(
                encoded["memory"], encoded["memory_mask"], encoded["spatial_shapes"]
            )
            logits = model.bbox_head.cls_branches[model.decoder.num_layers](memory)
            yield "output/two_stage/output_memory", memory
            yield "output/two_stage/proposals_unact", proposals
            yield "output/two_stage/enc_cls", logits
            scores = logits.amax(-1) if hasattr(model, "dn_query_generator") else logits[..., 0]
            yield "output/two_stage/topk_indices", torch.topk(scores, model.num_queries, dim=1)[1]
        for name, key in (
            ("query", "query"),
            ("query_pos", "query_pos"),
            ("initial_reference", "reference_points"),
        ):
            if key in start:
                yield f"output/decoder/{name}", start[key]
        decoder_inputs.update(start)
        decoded = model.forward_decoder(**decoder_inputs)
        yield "output/decoder/hidden_states", decoded["hidden_states"]
        yield from (
            (f"output/decoder/references/{i}", value) for i, value in enumerate(decoded["references"])
        )
        for name, padded in (("head", True), ("no_padding", False)):
            logits, boxes = model(images, mmdet_samples(arrays, padded, scaled=False), mode="tensor")
            yield f"output/{name}/cls_logits", logits
            yield f"output/{name}/boxes_cxcywh", boxes
        for name, scaled in (("predictions", False), ("predictions_rescaled", True)):
            for i, sample in enumerate(model(images, mmdet_samples(arrays, True, scaled), mode="predict")):
                for key in ("bboxes", "scores", "labels"):
                    yield f"output/{name}/{i}/{key}", sample.pred_instances[key]
    if hasattr(model, "dn_query_generator"):  # see mmdet_denoising_step
        return
    losses = model.train()(images, samples, mode="loss")
    yield from ((f"loss/{name}", value.reshape(())) for name, value in losses.items())
    yield "loss/total", sum(losses.values()).reshape(())
    sum(losses.values()).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            yield f"grad_norm/{name}", parameter.grad.norm().item()
    yield from ((key, parameters[key.removeprefix("grad/")].grad) for key in gradients)


def sparsedrive(folder: Path) -> None:
    """Run visdet's model over the two frames of each stage."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "models" / "sparsedrive"))
    import sparsedrive_golden as walk

    for stage in (1, 2):
        large = read(folder, f"sparsedrive_stage{stage}")
        arrays = {key: value for key, value in large.items() if is_kept_of_sparsedrive(key)}
        for index in range(2):
            shape = large[f"input/frame{index}/img"].shape
            arrays[f"drawn/input/frame{index}/img"] = np.array(shape)
        arrays["drawn_gain"] = np.array(1.0)
        inputs = dict(arrays)
        for index in range(2):
            name = f"input/frame{index}/img"
            inputs[name] = 2 * drawn(name, large[name].shape)

        model = walk.build(inputs)
        frames = [dict(values) for values in walk.evaluate(model, inputs)]
        frames[0].update(walk.features_and_depth(model, inputs))
        steps = list(walk.train(copy.deepcopy(model), inputs))
        for key in large:
            kind, _, rest = key.partition("/")
            if kind not in ("output", "train") or "/decoded/planning" in key or key.endswith("/cls_scores"):
                continue
            frame, _, name = rest.partition("/")
            index = int(frame.removeprefix("frame"))
            store(arrays, key, walk.part(frames[index] if kind == "output" else steps[index].outs, name))
        varied = [list(walk.train(with_noise(model, seed), inputs)) for seed in range(6)]
        for index, step in enumerate(steps):
            for name, value in step.losses.items():
                store(arrays, f"loss/frame{index}/{name}", value)
            norms = {
                name: norm
                for name, norm in step.grad_norms.items()
                if all(abs(other[index].grad_norms[name] - norm) <= 2e-4 * norm for other in varied)
            }
            print(
                f"stage {stage}, frame {index}: {len(norms)} of {len(step.grad_norms)} norms of gradients are kept"
            )
            arrays[f"grad_norm/frame{index}/names"] = np.array(list(norms))
            arrays[f"grad_norm/frame{index}/values"] = np.array(list(norms.values()))
        pack(f"sparsedrive_small_stage{stage}", arrays)


def with_noise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Return a copy with weights off by about one unit in the last place.

    A ReLU at zero then takes the other side, as another order of summation would make it: norms of gradients that
    depend on that are not worth storing.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2e-7 * torch.randn(parameter.shape, generator=generator))
    return model


def is_kept_of_sparsedrive(key: str) -> bool:
    """Tell whether the small file takes the array from the large one: inputs but images, anchors, fixed scales."""
    if key.startswith("state/"):
        return key.endswith(("anchor", "fix_scale"))
    return key == "config" or (key.startswith("input/") and not key.endswith("/img"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["deformable_detr", "sparsedrive"])
    parser.add_argument("folder", type=Path, nargs="?", default=SHARED)
    options = parser.parse_args()
    globals()[options.what](options.folder)
