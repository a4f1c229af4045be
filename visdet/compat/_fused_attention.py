"""Replacements of attention modules whose softmax and sampling locations are computed inside visdet's kernel.

An attention module of ``transformers`` predicts offsets and logits from its queries, converts them to locations and
weights, and calls the operator. ``ms_deform_attn_fused`` takes the predictions themselves. Before a class is changed, a
small module of it is built from known parts, in order to check that the replacement computes the same.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from visdet import ops

from ._attention import level_tables, note, takes

__all__ = ["Form", "attend_fused", "attention_classes", "find_form", "fused_forward", "module_disagreement"]

_ARGUMENTS = {"hidden_states", "encoder_hidden_states", "reference_points", "spatial_shapes_list"}


@dataclass(frozen=True)
class Form:
    """A known form of attention modules, which tells the names of their parts and how they use them.

    Attributes:
        points: the attribute with the number of points, which is one number for all levels or one number per level.
        is_projected: whether the module has ``value_proj`` and ``output_proj``.
        mask_is_padding: whether True in the mask marks padding. Otherwise, False marks padding.
        keeps_operator: whether the constructor keeps the operator in an attribute of the module.
        method: the attribute with the sampling method, or None if there is none. The fused operator serves the method
            "default" with ``offset_scale`` 0.5 and with boxes [B, Q, 1, 4] as references.
    """

    points: str
    is_projected: bool = True
    mask_is_padding: bool = False
    method: str | None = None
    keeps_operator: bool = False


_FORMS = (
    Form("n_points"),  # Deformable DETR
    Form("n_points", mask_is_padding=True),  # Mask2Former
    Form("n_points_list", method="method"),  # RT-DETRv2
    Form("num_points_list", is_projected=False, method="decoder_method", keeps_operator=True),  # D-FINE
)


def attention_classes(module: ModuleType) -> list[type[nn.Module]]:
    """Return the classes ``...DeformableAttention`` that a module defines and whose forward has known arguments."""
    return [
        owner
        for owner in vars(module).values()
        if isinstance(owner, type)
        and issubclass(owner, nn.Module)
        and owner.__module__ == module.__name__
        and owner.__name__.endswith("DeformableAttention")
        and "forward" in vars(owner)
        and set(inspect.signature(vars(owner)["forward"]).parameters) >= _ARGUMENTS
    ]


def find_form(owner: type[nn.Module], module: ModuleType) -> Form | None:
    """Return the form of a class, or None if it has none of the known forms."""
    return next((form for form in _FORMS if _computes(owner, module, form)), None)


def fused_forward(
    original: Callable[..., Any], form: Form, uses_visdet: Callable[[Any], bool]
) -> Callable[..., Any]:
    """Return a forward of this form that uses visdet's fused operator where it can, and otherwise the original.

    Args:
        original: the forward. form: its form.
        uses_visdet: a function that tells whether a module would call visdet's operator, and not another one that was
            put in its place.
    """
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        attended = None
        if uses_visdet(self):
            attended = _attend(self, form, {**dict(zip(names, args, strict=False)), **kwargs})
        return original(self, *args, **kwargs) if attended is None else attended

    return forward


def _attend(module: Any, form: Form, given: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    query: Any = given.get("hidden_states")
    memory: Any = given.get("encoder_hidden_states")
    references, shapes = given.get("reference_points"), given.get("spatial_shapes_list")
    if (
        not takes(memory)
        or not isinstance(query, Tensor)
        or not isinstance(references, Tensor)
        or shapes is None
    ):
        return None
    mask = given.get("attention_mask")
    if not _fits(module, form, query, references, shapes, memory, mask):
        return None
    # D-FINE's own forward ignores position embeddings.
    if form.is_projected and given.get("position_embeddings") is not None:
        query = query + given["position_embeddings"]
    if mask is not None and not form.mask_is_padding:
        mask = ~mask
    points = getattr(module, form.points)
    output, logits = attend_fused(module, query, memory, mask, references, shapes, points, form.is_projected)
    weights = torch.softmax(logits, -1)
    return output, weights if form.method else weights.unflatten(-1, (len(shapes), -1))


def attend_fused(
    module: Any,
    query: Tensor,  # [B, Q, channels]
    memory: Tensor,  # [B, S, channels]
    mask: Tensor | None,  # [B, S], True where a row of memory counts as zero
    references: Tensor,  # [B, Q, L or 1, 2 or 4]
    shapes: Any,  # [L, 2] (height, width): pairs of integers, or a tensor
    points: int | Sequence[int],
    is_projected: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Q, channels] of an attention module, and its logits [B, Q, G, K].

    Args:
        module: a module with ``n_heads`` and the layers ``sampling_offsets``, ``attention_weights`` and, if
            ``is_projected`` is True, ``value_proj`` and ``output_proj``.
        query, memory, mask, references, shapes: the arguments of its forward, as described above. ``mask`` is None if
            ``is_projected`` is False.
        points: the number of points, which is one number for all levels or one number per level.
        is_projected: whether the module projects the memory and the output.
    """
    value = module.value_proj(memory) if is_projected else memory
    if mask is not None:
        value = torch.where(mask[..., None], 0.0, value)  # masked_fill would copy the values first
    offsets = module.sampling_offsets(query).unflatten(-1, (module.n_heads, -1, 2))
    logits = module.attention_weights(query).unflatten(-1, (module.n_heads, -1))
    value = value.unflatten(-1, (module.n_heads, -1))
    note("ms_deform_attn_fused")
    output = ops.ms_deform_attn_fused(value, *level_tables(shapes), references, offsets, logits, points)
    return module.output_proj(output) if is_projected else output, logits


def _fits(
    module: Any,
    form: Form,
    query: Tensor,
    references: Tensor,
    shapes: Sequence[Any],
    memory: Tensor,
    mask: Tensor | None,
) -> bool:
    """Return whether the fused operator can compute this call. It leaves bad calls to the original and its errors."""
    levels = len(shapes)
    if references.dim() != 4 or memory.dim() != 3 or query.dim() != 3 or levels != module.n_levels:
        return False
    if references.shape[1] != query.shape[1]:
        return False  # The package's own forward broadcasts one reference to all queries.
    if sum(height * width for height, width in shapes) != memory.shape[1]:
        return False
    if mask is not None and not form.is_projected:
        return False  # D-FINE's own forward fails with a mask.
    if form.method is not None:
        is_standard = getattr(module, form.method) == "default" and module.offset_scale == 0.5
        return is_standard and references.shape[2:] == (1, 4)
    core = getattr(module, "attn", None)
    is_own = core is None or _is_untouched(core)
    return is_own and references.shape[2] in (1, levels) and references.shape[3] in (2, 4)


def _is_untouched(module: nn.Module) -> bool:
    """Return whether calling a module runs its class's forward and, apart from global hooks, nothing else."""
    own = vars(module)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in own and not any(own[name] for name in hooks)


def _computes(owner: type[nn.Module], module: ModuleType, form: Form) -> bool:
    """Return whether a small module of this class computes the same as ``_attend`` with this form."""
    example = _example(owner, module, form)
    forward = vars(owner)["forward"]
    known = inspect.signature(forward).parameters
    for boxes in (True,) if form.method else (False, True):
        arguments = {key: value for key, value in _example_arguments(boxes).items() if key in known}
        if not form.is_projected:
            del arguments["attention_mask"]
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                expected = forward(example, **arguments)
                found = _attend(example, form, arguments)
        except (AttributeError, NameError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
            return False  # The class uses parts that a module of this form does not have.
        if not isinstance(expected, tuple) or len(expected) != 2 or found is None:
            return False
        if not all(_is_same(one, other) for one, other in zip(expected, found, strict=True)):
            return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    is_pair = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return is_pair and torch.allclose(one, other, rtol=1e-9, atol=1e-9)


_DIMS, _HEADS, _SHAPES = 8, 2, [(3, 4), (2, 2)]


def module_disagreement(
    owner: type[nn.Module],
    original: Callable[..., Tensor],
    replacement: Callable[..., Tensor],
    tables: Sequence[Any],
    **attributes: Any,
) -> str | None:
    """Return None if two forwards of a class agree on a small example, and otherwise how they differ.

    Args:
        owner: a class of attention modules, which have ``n_levels``, ``n_heads``, ``n_points`` and the four layers.
        original: its forward of (self, query, reference points, memory, *tables, mask), which returns the output.
        replacement: visdet's forward of the same arguments.
        tables: the arguments between the memory and the mask for the example, whose levels are 3 x 4 and 2 x 2.
        attributes: further attributes that the forward reads.
    """
    example = _example_with_parts(owner, _HEADS * len(_SHAPES) * 2, is_projected=True)
    vars(example).update(attributes)
    for boxes in (False, True):
        given = _example_arguments(boxes)
        arguments = (
            given["hidden_states"],
            given["reference_points"][:, :, :1],
            given["encoder_hidden_states"],
            *tables,
            given.get("attention_mask"),
        )
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                expected, found = original(example, *arguments), replacement(example, *arguments)
        except (AttributeError, NameError, TypeError, ValueError, RuntimeError, LookupError) as error:
            return f"fails on a small example ({type(error).__name__}: {error})"
        if not _is_same(expected, found):
            return "computes something else than visdet's fused operator"
    return None


def _example(owner: type[nn.Module], module: ModuleType, form: Form) -> Any:
    """Return a module of a class that has only the parts of a form."""
    points = [1, 3] if form.method == "decoder_method" else [2, 2]
    example = _example_with_parts(owner, _HEADS * sum(points), form.is_projected)
    if form.method:
        setattr(example, form.points, points)
        setattr(example, form.method, "default")
        example.offset_scale = 0.5
        scale = torch.tensor([1 / n for n in points for _ in range(n)], dtype=torch.float64, device="cpu")
        setattr(example, f"{form.points.removesuffix('_list')}_scale", scale)
        example.ms_deformable_attn_core = getattr(module, "multi_scale_deformable_attention_v2", None)
    elif hasattr(module, "MultiScaleDeformableAttention"):
        example.attn = module.MultiScaleDeformableAttention()
    return example


def _example_with_parts(owner: type[nn.Module], samples: int, is_projected: bool) -> Any:
    """Return a module of a class with random layers for so many samples. The constructor of the class is not called."""
    example: Any = owner.__new__(owner)
    nn.Module.__init__(example)
    example.d_model, example.n_heads, example.n_levels, example.im2col_step = _DIMS, _HEADS, len(_SHAPES), 64
    example.n_points = 2
    layers = {"sampling_offsets": 2 * samples, "attention_weights": samples}
    if is_projected:
        layers |= {"value_proj": _DIMS, "output_proj": _DIMS}
    generator = torch.Generator("cpu").manual_seed(0)
    for name, width in layers.items():
        layer = nn.utils.skip_init(nn.Linear, _DIMS, width, device="cpu", dtype=torch.float64)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-1, 1, generator=generator)
        setattr(example, name, layer)
    return example


def _example_arguments(boxes: bool) -> dict[str, Any]:
    """Return keyword arguments for the forward of an attention module.

    With ``boxes``, the references are boxes, and there are a mask and position embeddings.
    """
    generator = torch.Generator("cpu").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float64)

    rows = sum(height * width for height, width in _SHAPES)
    arguments: dict[str, Any] = dict(
        hidden_states=random(2, 5, _DIMS),
        encoder_hidden_states=random(2, rows, _DIMS) - 0.5,
        reference_points=random(2, 5, 1 if boxes else len(_SHAPES), 4 if boxes else 2),
        spatial_shapes=torch.tensor(_SHAPES, device="cpu"),
        spatial_shapes_list=_SHAPES,
    )
    if boxes:
        arguments["attention_mask"] = random(2, rows) > 0.3
        arguments["position_embeddings"] = random(2, 5, _DIMS)
    return arguments
