"""Deformable DETR and DINO at toy size: every variant, padding, empty images, types, refusals."""

import pytest
import torch
from mmengine.config import ConfigDict
from tiny_detr import BATCH, VARIANTS, batch, build, config
from torch.testing import assert_close
from training_steps import are_finite, backward, without_gradient

from visdet.engine import load_config
from visdet.errors import UserError
from visdet.models.layers.as_if_unpadded import Padding
from visdet.registry import MODELS
from visdet.structures import DetDataSample
from visdet.structures.planned_batch import BatchPlan

for_each_variant = pytest.mark.parametrize("variant", VARIANTS)


@for_each_variant
def test_all_modes(variant):
    model = build(variant)
    images, samples = batch()
    losses = model.train()(images, samples, mode="loss")
    denoising = ["dn_", "d0.dn_"] * (variant == "dino")
    prefixes = ("", "d0.", *["enc_"] * model.as_two_stage, *denoising)
    assert set(losses) == {f"{prefix}loss_{name}" for prefix in prefixes for name in ("cls", "bbox", "iou")}
    assert all(
        loss.dim() == 0 and loss.isfinite() and loss.dtype == torch.float32 for loss in losses.values()
    )
    model.eval()
    with torch.no_grad():
        predicted = model(images, samples, mode="predict")
    assert {name.split("loss_")[0] for name in model(images, samples, mode="loss")} == {"", "d0."}
    for sample in predicted:
        instances = sample.pred_instances
        assert instances.bboxes.shape == (5, 4)
        assert (instances.scores.diff() <= 0).all()
        assert ((instances.labels >= 0) & (instances.labels < 3)).all()
        assert (instances.bboxes >= 0).all()
        assert (instances.bboxes <= torch.tensor([96, 64, 96, 64])).all()


def test_the_stride_of_a_map_is_that_of_its_batch():
    assert Padding(torch.tensor([[65, 60]]), (70, 131)).sizes_on((2, 3)).tolist() == [[2, 1]]


@torch.no_grad()
def test_planned_batches_need_a_neck_that_leaves_padding_out():
    """Other tests show that predictions of the packaged configs do not depend on the batch."""
    model = build().eval()
    images, samples = batch(sizes=((49, 96), BATCH))
    BatchPlan(None, ()).write(samples, BATCH)
    model.neck = torch.nn.Sequential(model.neck)
    with pytest.raises(UserError, match="ChannelMapper"):
        model(images, samples, mode="predict")


@torch.no_grad()
@pytest.mark.parametrize("variant", ["two_stage", "dino"])
@pytest.mark.parametrize(("only_usable", "chosen"), [(False, 0), (True, 7)])
def test_pixels_without_a_box_are_chosen_last_on_request(variant, only_usable, chosen, monkeypatch):
    """A pixel of the border or of padding has the box (1, 1, 1, 1), which gets no gradient."""
    model = build(variant, only_usable_proposals=only_usable).eval()
    torch.nn.init.zeros_(model.memory_trans_fc.bias)

    def prefers_zeros(module, inputs, logits):
        return -inputs[0].abs().sum(-1, keepdim=True).expand_as(logits)

    model.bbox_head.cls_branches[-1].register_forward_hook(prefers_zeros)
    starts = []
    decoder_start = model.decoder_start
    monkeypatch.setattr(
        model, "decoder_start", lambda *given: starts.append(decoder_start(*given)) or starts[-1]
    )
    images, samples = batch(sizes=((48, 64), (40, 80)))
    model(images, samples, mode="tensor")
    assert (starts[0].references < 1).all(-1).sum(1).tolist() == [chosen, chosen]


@torch.no_grad()
def test_padding_keeps_the_memory_format_of_maps():
    """Each convolution would have to convert another one."""
    backbone, (images, _) = build().eval().backbone, batch()
    padding = Padding(torch.tensor([[49, 77]] * len(images)), BATCH)
    for maps in (backbone(images), backbone(images, padding)):
        assert all(one.is_contiguous(memory_format=torch.channels_last) for one in maps)


@torch.no_grad()
def test_sizes_are_the_batchs_where_samples_say_nothing():
    model = build().eval()
    images, _ = batch()
    expected = model(images, [DetDataSample(metainfo={"img_shape": BATCH}) for _ in images], mode="tensor")
    for samples in (None, [DetDataSample(), DetDataSample()]):
        assert_close(model(images, samples, mode="tensor"), expected, rtol=0, atol=0)
    assert len(model(images, mode="predict")[0].pred_instances) == 5


@for_each_variant
@pytest.mark.parametrize("counts", [(0, 2), (0, 0), (12, 1)])
def test_any_number_of_objects(variant, counts):
    """The loss stays connected to every parameter, so that no process of a group waits for a gradient in vain."""
    model = build(variant)
    losses = model(*batch(counts), mode="loss")
    backward(losses)
    if not any(counts):
        assert all(losses[name] == 0 for name in losses if not name.endswith("cls"))
        assert losses["loss_cls"] > 0
    assert not without_gradient(model)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["two_stage", "dino"])
def test_fewer_pixels_than_queries(variant):
    model = build(variant, num_queries=500)
    images, samples = batch()
    assert are_finite(model(images, samples, mode="loss"))
    assert model.eval()(images, samples, mode="tensor")[0].shape[2] == 4 * 6 + 2 * 3 + 1 * 2


def test_a_diverged_model_reports_a_loss_that_is_not_finite():
    model = build("refine")
    images, samples = batch()
    assert not model(images * float("nan"), samples, mode="loss")["loss_cls"].isfinite()


def test_autocast():
    model = build("refine")
    images, samples = batch()
    exact = model(images, samples, mode="loss")
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(images, samples, mode="loss")
        logits, boxes = model(images, samples, mode="tensor")
    assert logits.dtype == boxes.dtype == torch.float32
    for name, loss in rounded.items():
        assert loss.dtype == torch.float32
        assert_close(loss, exact[name], rtol=0.1, atol=0.05)
    backward(rounded)
    assert not without_gradient(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@for_each_variant
def test_a_model_converted_to_another_type(variant, dtype):
    model = build(variant).eval().to(dtype)
    images, samples = batch()
    (predicted, _) = model(images.to(dtype), samples, mode="predict")
    expected = torch.promote_types(dtype, torch.float32)
    assert predicted.pred_instances.bboxes.dtype == predicted.pred_instances.scores.dtype == expected
    assert predicted.pred_instances.bboxes.isfinite().all()


def test_encoder_checkpointing_changes_nothing():
    images, samples = batch()
    gradients = []
    for num_cp in (-1, 2):
        model = build("refine")
        model.encoder.num_cp = num_cp
        backward(model(images, samples, mode="loss"))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(*gradients)


def test_init_weights():
    model = MODELS.build(config(**VARIANTS["refine"]))
    model.init_weights()
    head = model.bbox_head
    assert_close(head.cls_branches[1].bias.sigmoid(), torch.full((3,), 0.01))
    first, second = (branch[-1] for branch in head.reg_branches[:2])
    assert first.bias.tolist() == [0, 0, -2, -2] and second.bias.tolist() == [0, 0, 0, 0]
    assert not first.weight.any()
    assert (
        model.encoder.layers[0].self_attn.sampling_offsets.bias.abs().max() == 2
    )  # as many pixels as points
    assert 0.5 < model.level_embed.std() < 2
    two_stage = MODELS.build(config(**VARIANTS["two_stage"]))
    two_stage.init_weights()
    assert not two_stage.bbox_head.reg_branches[0][-1].bias.any()


def _changed(part, **options):
    given = config()
    given[part] = {**given[part], **options}
    return given


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (config(encoder=None), ValueError, "encoder"),
        (config(bbox_head=None), ValueError, "bbox_head"),
        (
            config(num_feature_levels=4),
            ValueError,
            "num_feature_levels must be .* encoder, 3, got 4",
        ),
        (
            _changed("positional_encoding", num_feats=6),
            ValueError,
            "num_feats must be .* encoder, 16, got 12",
        ),
        (
            _changed("bbox_head", embed_dims=256),
            ValueError,
            "bbox_head.embed_dims must be .* encoder, 16, got 256",
        ),
        (config(test_cfg={"max_per_img": -1}), ValueError, r"max_per_img'\] must be int of 1 or more"),
        (_changed("bbox_head", num_classes=0), ValueError, "num_classes must be"),
        (_changed("bbox_head", type="DeformableDETRHed"), KeyError, "DeformableDETRHead"),
        (_changed("decoder", return_intermediate=False), ValueError, "return_intermediate must be True"),
        (_changed("decoder", post_norm_cfg={"type": "LN"}), ValueError, "post_norm_cfg must be None"),
        (config(num_query=300), TypeError, "unexpected keyword argument 'num_query'"),
    ],
)
def test_configs_that_cannot_work(given, error, message):
    with pytest.raises(error, match=message):
        MODELS.build(given)


@pytest.mark.parametrize(("neck", "widths"), [(None, r"\[.*\]"), ({"num_outs": 4}, r"\[16, 16, 16, 16\]")])
def test_a_neck_with_other_maps_is_named(neck, widths):
    given = config()
    model = MODELS.build({**given, "neck": neck and {**given["neck"], **neck}})
    with pytest.raises(
        UserError, match=rf"neck must give 3 maps of 16 channels .*, got maps of {widths} channels"
    ):
        model.extract_feat(torch.zeros(1, 3, 64, 64))


def _labels_out_of_range(samples):
    samples[1].gt_instances.labels[0] = 3
    return samples


def _too_large(samples):
    samples[1].set_metainfo({"img_shape": (64, 97)})
    return samples


@pytest.mark.parametrize(
    ("change", "mode", "error", "message"),
    [
        (
            lambda i, s: (i, s),
            "losses",
            ValueError,
            "mode must be 'tensor', 'predict' or 'loss', got 'losses'",
        ),
        (lambda i, s: (i, None), "loss", ValueError, "mode 'loss' needs data_samples"),
        (
            lambda i, s: (i[0], s),
            "tensor",
            TypeError,
            r"inputs must be a \[B, 3, H, W\] tensor, got \(3, 64, 96\)",
        ),
        (
            lambda i, s: (list(i), s),
            "tensor",
            TypeError,
            r"got list.*model\.data_preprocessor",
        ),
        (lambda i, s: (i, s[:1]), "tensor", ValueError, "one per image: got 1 for 2 images"),
        (
            lambda i, s: (i, _too_large(s)),
            "tensor",
            ValueError,
            r"data_samples\[1\].img_shape .* got \(64, 97\)",
        ),
        (
            lambda i, s: (i, [DetDataSample()] * 2),
            "loss",
            ValueError,
            r"data_samples\[0\].gt_instances must have bboxes",
        ),
        (lambda i, s: (i, _labels_out_of_range(s)), "loss", ValueError, r"labels must lie in 0..2"),
    ],
)
def test_calls_that_cannot_work(change, mode, error, message):
    model = build("base")
    with pytest.raises(error, match=message):
        model(*change(*batch()), mode=mode)


def test_compile_traces_from_images_to_raw_outputs_without_a_break(device):
    model = build("base").to(device).eval()
    model.encoder.layers, model.decoder.layers = model.encoder.layers[:1], model.decoder.layers[:1]
    images, samples = batch(sizes=(BATCH, (50, 80)))
    images = images.to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    outs, expected = compiled(images, samples, mode="tensor"), model(images, samples, mode="tensor")
    assert_close(outs, expected, rtol=1e-3, atol=1e-3 if device == "cuda" else 1e-5)


class RawOutputs(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images, None, mode="tensor")


def test_an_export_leaves_no_tables_without_numbers():
    """Tables of a size are kept for later calls, but not those that an export has made."""
    model = build("base").eval()
    images, samples = batch(sizes=((64, 72), (64, 72)))
    images = images[:, :, :64, :72].contiguous()  # no other test has this size
    with torch.no_grad():
        program = torch.export.export(RawOutputs(model), (images,))
        expected = model(images, None, mode="tensor")
        found = program.module()(images)
    for one, other in zip(found, expected, strict=True):
        assert type(other) is torch.Tensor
        assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert are_finite(model.train()(images, samples, mode="loss"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layer_cfg", 3, "layer_cfg must be dict"),
        ("layer_cfg.ffn_cfg", 3, "ffn_cfg must be dict"),
        ("layer_cfg.self_attn_cfg", (1, 2), "self_attn_cfg must be dict"),
        ("layer_cfg.self_attn_cfg.num_heads", "x", "MultiScaleDeformableAttention: num_heads must be int"),
        ("num_layers", ConfigDict(a=1), "num_layers must be int"),
        ("layer_cfg.norm_cfg", {"type": 3}, "norm_cfg must have the name of a layer as type"),
    ],
)
def test_a_value_deep_in_a_config_is_named(key, value, message):
    cfg, _ = load_config("deformable_detr/deformable-detr_shapes", {f"model.encoder.{key}": value})
    with pytest.raises(UserError, match=message):
        MODELS.build(cfg.model)
