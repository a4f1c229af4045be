"""What a server sends is kept only if it is a whole checkpoint."""

import http.server
import io
import threading
from types import SimpleNamespace

import pytest
import torch
from mmengine.runner import CheckpointLoader
from torchvision.models import ResNet18_Weights

from visdet.engine import CheckpointError, read_checkpoint
from visdet.engine.checkpoints import checkpoint
from visdet.engine.checkpoints.checkpoint import register_checkpoint_readers
from visdet.engine.errors import DamagedCheckpointError, MissingCheckpointError
from visdet.models.backbones.pretrained import PretrainedWeightsError, load_pretrained


def checkpoint_bytes(zipped=True, **content):
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(500.0), **content}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Send ``body`` under every address of this machine, and say that it has ``length`` bytes."""
    cache = tmp_path / "checkpoints"
    state = SimpleNamespace(body=b"", length=0, requests=0, cache=cache, cached=lambda: list(cache.iterdir()))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            state.requests += 1
            self.send_response(200)
            self.send_header("Content-Length", str(state.length or len(state.body)))
            self.end_headers()
            self.wfile.write(state.body)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        state.url = f"http://127.0.0.1:{listening.server_port}/model.pth"
        yield state
        listening.shutdown()


WHOLE, LEGACY = checkpoint_bytes(), checkpoint_bytes(zipped=False)
SENT = {
    "cut": (WHOLE[:1500], len(WHOLE)),
    "cut without a length": (WHOLE[:-1], 0),
    "cut legacy": (LEGACY[:-100], len(LEGACY)),
    "of another length": (LEGACY, len(LEGACY) + 100),
    "login": (b"<!DOCTYPE html><title>Log in</title>", 0),
    "nothing": (b"", 0),
    "flipped": (WHOLE.replace(torch.tensor(7.0).numpy().tobytes(), b"\1\2\3\4"), 0),
}


def assert_is_refused(server, error, message):
    with pytest.raises(error, match=message):
        read_checkpoint(server.url)
    assert not server.cached()


@pytest.mark.parametrize("name", SENT)
def test_what_is_no_whole_checkpoint_is_not_kept(server, name):
    server.body, server.length = SENT[name]
    message = r"model\.pth .*cannot be read.*Nothing is kept as .*model\.pth"
    assert_is_refused(server, DamagedCheckpointError, message)
    server.body, server.length = WHOLE, 0
    for _ in range(2):
        assert len(read_checkpoint(server.url)["w"]) == 500
    assert server.requests == 2 and len(server.cached()) == 1


def test_a_damaged_file_in_the_cache_is_named_and_replaced(server, stdout):
    server.body = WHOLE
    read_checkpoint(server.url)
    (cached,) = server.cached()
    cached.write_bytes(WHOLE[:100])
    assert len(read_checkpoint(server.url)["w"]) == 500 and cached.read_bytes() == WHOLE
    assert f"in the cache, {cached}, (100 bytes) cannot be read" in stdout()
    cached.write_bytes(WHOLE[:100])
    server.url = server.url.replace("model", "other")
    server.body = b""
    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(server.url)
    assert cached.read_bytes() == WHOLE[:100], "the file of another address stays"


def test_a_whole_file_that_needs_trust_is_kept(server):
    server.body = checkpoint_bytes(extra=SimpleNamespace())
    for _ in range(2):
        with pytest.raises(CheckpointError, match="trust_checkpoint=True"):
            read_checkpoint(server.url)
    assert server.requests == 1
    assert isinstance(read_checkpoint(server.url, trust=True)["extra"], SimpleNamespace)


def test_a_checksum_in_the_name_is_compared(server):
    server.body, server.url = WHOLE, server.url.replace("model", "model-01234567")
    message = r"invalid hash value.*put the file at .*model-01234567\.pth"
    assert_is_refused(server, MissingCheckpointError, message)


@pytest.mark.parametrize("scheme", ["open-mmlab", "openmmlab", "mmcls", "modelzoo", "torchvision"])
def test_names_of_mmengine_are_downloaded_as_addresses_are(server, monkeypatch, scheme):
    server.body, server.length = WHOLE[:1500], len(WHOLE)
    monkeypatch.setitem(checkpoint._LISTS_OF_ADDRESSES, scheme, lambda: {"net": server.url})
    register_checkpoint_readers()
    for path in (f"{scheme}://net", f"{scheme}://nett"):
        message = (
            "1500 of its .*Nothing is kept" if path.endswith("net") else "mmengine's list, which has net"
        )
        with pytest.raises(CheckpointError, match=message):
            CheckpointLoader.load_checkpoint(path)
    assert not server.cached()
    server.body, server.length = checkpoint_bytes(state_dict={"backbone.weight": torch.ones(1, 1)}), 0
    content = CheckpointLoader.load_checkpoint(f"{scheme}://net")
    assert list(content.get("state_dict", content)) == ["weight" if scheme == "mmcls" else "backbone.weight"]
    assert len(server.cached()) == 1


def test_damaged_weights_of_torchvision_in_the_cache_are_named(server):
    cached = server.cache / ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    cached.parent.mkdir()
    cached.write_bytes(WHOLE[:500])
    with pytest.raises(PretrainedWeightsError, match=f"are damaged .*Remove {cached}"):
        load_pretrained(torch.nn.Linear(1, 1), "torchvision://resnet18")
