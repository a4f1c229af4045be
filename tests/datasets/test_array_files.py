"""Files of arrays that cannot be read are named, whatever reads them."""

import io
import warnings

import numpy as np
import pytest

from visdet.checks.array_files import load_array
from visdet.errors import UserError
from visdet.models.sparsedrive.anchor_files import ModuleWithAnchors


def saved(values, save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, values)
    return file.getvalue()


WHOLE = saved(np.ones((3, 11)))
PACKED = saved(np.random.default_rng(0).random((64, 64)), np.savez_compressed)
DAMAGED = {
    "text": b"anchors",
    "empty": b"",
    "cut": WHOLE[:-8],
    "cut header": WHOLE[:40],
    "objects": saved(np.array([{}, None], dtype=object)),
    "cut archive": PACKED[:-100],
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "a.npy"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(UserError, match=r"array file .*a\.npy cannot be read"):
        ModuleWithAnchors().read_anchors("anchor", str(path), (3, 11))


def test_whole_files_are_read(tmp_path):
    (tmp_path / "a.npy").write_bytes(WHOLE)
    (tmp_path / "a.npz").write_bytes(PACKED)
    assert load_array(tmp_path / "a.npy").shape == (3, 11)
    with pytest.raises(UserError, match=r"b\.npy does not exist"):
        load_array(tmp_path / "b.npy")
    with pytest.raises(UserError, match=r"a\.npz must be a \.npy file, got one with the arrays \['arr_0'\]"):
        load_array(tmp_path / "a.npz")


def test_anchors_that_are_not_finite_are_named(tmp_path):
    np.save(tmp_path / "a.npy", np.full((3, 11), np.nan))
    with warnings.catch_warnings(), pytest.raises(UserError, match=r"a\.npy: anchor must be finite"):
        warnings.simplefilter("error")
        ModuleWithAnchors().read_anchors("anchor", str(tmp_path / "a.npy"), (3, 11))
