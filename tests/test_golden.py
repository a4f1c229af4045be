"""The small golden vectors: all there, small, and the same as the large ones they come from."""

import numpy as np
from golden import OWN, SHARED, golden, published_shapes
from numpy.testing import assert_array_equal

UNIT_CASES = ("modules", "fused_sample_ops", "gaussian_field")
MODELS = (
    *(f"deformable_detr_small_{variant}" for variant in ("base", "refine", "two_stage")),
    "dino_small",
    "swin_small",
    *(f"sparsedrive_small_stage{stage}" for stage in (1, 2)),
)


def test_every_clone_has_vectors_of_operators_modules_and_both_families():
    for name in (*UNIT_CASES, *MODELS):
        assert (OWN / "golden" / f"{name}.npz.xz").exists(), name
    assert sum(path.stat().st_size for path in OWN.rglob("*")) <= 2 * 2**20
    assert published_shapes("sparsedrive_stage2")["head.det_head.layers.4.attn.in_proj_weight"] == (1536, 512)


def test_unit_cases_are_those_of_the_large_vectors():
    for name in UNIT_CASES:
        path = SHARED / "golden" / f"{name}.npz"
        if path.exists():
            with np.load(path) as large:
                small = golden(name)
                assert set(small) == set(large.files)
                for key in large.files:
                    assert_array_equal(small[key], large[key], err_msg=key)


def test_drawn_numbers_do_not_depend_on_the_version_of_numpy():
    images = golden("deformable_detr_small_base")["input/images"]
    assert images.shape == (2, 3, 96, 128)
    assert (images[0, 0, 0, :6] * 32).tolist() == [14, 22, -2, -46, -43, 27]
