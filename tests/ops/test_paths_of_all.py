"""Every operator's launches fit every GPU, whatever the sizes: without a GPU, on tensors without data."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from path_cases import devices, needs_library

from tests.fuzz.operators import OPERATORS
from tests.fuzz.sizes import empty
from visdet.ops import explain


@needs_library
@pytest.mark.parametrize(
    "name", [name for name, operator in OPERATORS.items() if operator.launches is not None]
)
def test_launches_fit_every_device(name):
    launches = 0

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(arguments=OPERATORS[name].launches, device=devices, deterministic=st.booleans())
    def check(arguments, device, deterministic):
        nonlocal launches
        torch.use_deterministic_algorithms(deterministic)
        try:
            plan = explain(name, **arguments, device=device)
            launches += sum(len(one.launches) for one in plan.plans)
        except (RuntimeError, ValueError) as error:
            assert re.search(r"must|at most|at the most|too large", str(error)), error
            assert "CUDA kernel" not in str(error), error
        finally:
            torch.use_deterministic_algorithms(False)

    check()
    assert launches > 0


DEFORM_CONV_CHOICES = {
    "published": (dict(C=256, groups=1, G=1), torch.float32, "packs", "packs"),
    "published-bf16": (dict(C=256, groups=1, G=4), torch.bfloat16, "packs", "packs"),
    "resnext": (dict(C=256, groups=32, G=1), torch.bfloat16, "packs", "packs"),
    "four-channels-a-group": (dict(C=32, groups=8, G=1), torch.float16, "values", "packs"),
    "odd-channels": (dict(C=30, groups=1, G=1), torch.float32, "values", "values"),
    "groups-that-cross": (dict(C=24, groups=2, G=8), torch.float32, "values", "values"),
    "float64": (dict(C=256, groups=1, G=1), torch.float64, "values", "values"),
}


@needs_library
@pytest.mark.parametrize("name", DEFORM_CONV_CHOICES)
def test_choices_of_deform_conv2d(name):
    sizes, dtype, forward, backward = DEFORM_CONV_CHOICES[name]
    C, groups, G = sizes["C"], sizes["groups"], sizes["G"]
    plan = explain(
        "deform_conv2d",
        input=empty(2, C, 50, 68, dtype=dtype),
        offset=empty(2, G * 18, 50, 68, dtype=dtype),
        weight=empty(2 * groups, C // groups, 3, 3, dtype=dtype),
        padding=1,
        groups=groups,
        deform_groups=G,
        device="H200",
    )
    assert plan.paths() == {"deform_conv2d": forward, "deform_conv2d_backward": backward}
