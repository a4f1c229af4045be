"""The stand-in for flash_attn against attention written out, for each form of its functions."""

import functools
import importlib
import inspect

import pytest
import torch
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.compat import extensions
from visdet.compat import flash_attention as flash
from visdet.compat.flash_padding import index_first_axis, pad_input, unpad_input

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LENGTHS_Q, LENGTHS_K = [3, 5, 0, 2, 4], [4, 5, 3, 0, 1]


def written_out(q, k, v, scale, causal, to_end):  # [Sq, H, D], [Sk, Hk, D]
    """Return the attention of one sequence, query by query."""
    out = torch.zeros_like(q)
    shift = len(k) - len(q) if to_end else 0
    for i in range(len(q)):
        for head in range(q.shape[1]):
            seen = [j for j in range(len(k)) if not causal or j <= i + shift]
            if seen:
                kv_head = head // (q.shape[1] // k.shape[1])
                weights = (k[seen, kv_head] @ q[i, head] * scale).softmax(0)
                out[i, head] = weights @ v[seen, kv_head]
    return out


def sequences(lengths, heads, device, dtype, seed, D=8):
    generator = generator_of(seed)
    return torch.randn(sum(lengths), heads, D, generator=generator).to(device, dtype).requires_grad_()


def starts(lengths, device):
    return torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    "function", ["unpadded", "varlen", "unpadded_kvpacked", "varlen_kvpacked", "varlen_heads"]
)
@pytest.mark.parametrize("lengths", [(LENGTHS_Q, LENGTHS_K), ([3, 3], [5, 5]), ([4, 4], [4, 4])], ids=str)
def test_sequences_of_several_lengths(function, lengths, causal, dtype, device):
    heads = 1 if function == "varlen_heads" else 2
    of_queries, of_keys = lengths
    q = sequences(of_queries, 2, device, dtype, 1)
    k, v = (sequences(of_keys, heads, device, dtype, seed) for seed in (2, 3))
    tables = (starts(of_queries, device), starts(of_keys, device), max(of_queries), max(of_keys) + 1)
    attend = getattr(flash, f"flash_attn_{function.removesuffix('_heads')}_func")
    keys = (torch.stack([k, v], 1),) if function.endswith("kvpacked") else (k, v)
    out = attend(q, *keys, *tables, 0.0, softmax_scale=0.3, causal=causal)
    wide = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    parts = zip(wide[0].split(of_queries), *(x.split(of_keys) for x in wide[1:]), strict=True)
    expected = torch.cat([written_out(*part, 0.3, causal, function.startswith("varlen")) for part in parts])
    tolerance = TOLERANCE[dtype]
    assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)
    grad = torch.randn_like(expected)
    found, wanted = (
        torch.autograd.grad(out, (q, k, v), grad.to(out)),
        torch.autograd.grad(expected, wide, grad),
    )
    margins = dict(atol=4 * tolerance, rtol=4 * tolerance, check_dtype=False, check_device=False)
    assert_close(found, wanted, **margins)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_and_packed_forms_agree(causal):
    qkv = torch.randn(2, 5, 3, 2, 8, dtype=torch.float64)
    q, k, v = qkv.unbind(2)
    expected = torch.stack([written_out(*item, 8**-0.5, causal, True) for item in zip(q, k, v, strict=True)])
    flat, table, named = qkv.flatten(0, 1), starts([5, 5], "cpu"), dict(causal=causal)
    none = (-1, -1)
    for out in (
        flash.flash_attn_func(q, k, v, **named, window_size=none),
        flash.flash_attn_func(q, k, v, 0.0, None, causal, none, 0.0, None, False, False),  # 2.6 and later
        flash.flash_attn_func(q, k, v, 0.0, None, causal, none, None, False, False),  # 2.4 and 2.5
        flash.flash_attn_func(q, k, v, 0.0, None, causal, none, False),  # 2.3
        flash.flash_attn_func(q, k, v, 0.0, None, causal, False),  # 2.0 to 2.2
        flash.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **named),
        flash.flash_attn_qkvpacked_func(qkv, **named),
        flash.flash_attn_varlen_qkvpacked_func(flat, table, 5, **named).unflatten(0, (2, 5)),
        flash.flash_attn_unpadded_qkvpacked_func(flat, table, 5, 0.0, None, causal).unflatten(0, (2, 5)),
    ):
        assert_close(out, expected)


def test_dropout_keeps_the_mean_and_follows_the_seed(device):
    q = torch.zeros(4000, 2, 8, device=device)
    kv = torch.ones(8000, 2, 2, 8, device=device)
    arguments = q, kv, starts([2000, 2000], device), starts([4000, 4000], device), 2000, 4000
    drawn = functools.partial(flash.flash_attn_unpadded_kvpacked_func, *arguments, 0.25)
    torch.manual_seed(3)
    first, again = drawn(), drawn()
    torch.manual_seed(3)
    assert_close(first, drawn())
    assert not torch.equal(first, again)
    # A weight is 1 / 4000 with probability 0.75, divided by 0.75, so that the sum of 4000 has this deviation.
    assert abs(first.mean() - 1) < 1e-3 and abs(first[..., 0].std() - (0.25 / 0.75 / 4000) ** 0.5) < 5e-4


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
def test_padding_is_dropped_and_restored(mask_dtype):
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]).to(mask_dtype)
    tokens, indices, begin, longest = unpad_input(x, mask)
    assert indices.tolist() == [0, 2, 3, 8, 9] and begin.tolist() == [0, 3, 3, 5] and longest == 3
    assert begin.dtype == torch.int32 and tokens.shape == (5, 5)
    assert_close(tokens, index_first_axis(x.flatten(0, 1), indices))
    assert_close(pad_input(tokens, indices, 3, 4), x * mask[..., None])
    assert torch.autograd.gradcheck(lambda y: pad_input(unpad_input(y, mask)[0], indices, 3, 4), x)
    *_, used = unpad_input(x, mask, (mask == 0).to(mask_dtype))
    assert used.tolist() == [3, 0, 2]


@pytest.mark.parametrize(
    "name, value",
    [
        ("window_size", (2, 0)),
        ("softcap", 5.0),
        ("alibi_slopes", torch.ones(2)),
        ("return_attn_probs", True),
    ],
)
def test_an_option_that_is_not_computed_is_refused(name, value):
    q = torch.zeros(1, 2, 2, 8)
    with pytest.raises(NotImplementedError, match=f"flash_attn_func: {name} must have its default"):
        flash.flash_attn_func(q, q, q, **{name: value})
    with pytest.raises(NotImplementedError, match="an option behind causal must have"):
        flash.flash_attn_func(q, q, q, 0.0, None, False, value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        flash.flash_attn_func(q, q, q, colour=1)


def test_the_modules_that_repositories_import():
    module_of = importlib.import_module
    with extensions.installed():
        interface = module_of("flash_attn.flash_attn_interface")
        padding = module_of("flash_attn.bert_padding")
        assert set(flash.__all__) <= set(vars(interface)) and set(flash.__all__) <= set(
            vars(module_of("flash_attn"))
        )
        assert inspect.unwrap(padding.unpad_input) is unpad_input
        with pytest.raises(ModuleNotFoundError):
            module_of("flash_attn.layers")


@pytest.mark.parametrize("begin, longest", [([0, 2, 6], 3), ([0, 2, 4], 4), ([0, 7, 6], 8)], ids=str)
def test_tables_that_do_not_fit_are_refused(begin, longest):
    q = torch.zeros(6, 2, 8)
    table = torch.tensor(begin, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"cu_seqlens_q must rise from 0 to the 6 rows .* = {longest}"):
        flash.flash_attn_varlen_func(q, q, q, table, table, longest, longest)
