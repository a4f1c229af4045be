"""Training steps and predictions by CUDA graphs: the numbers of eager ones, whatever the batch, and what falls back."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from from_host import copies_of_losses
from mmengine.optim import OptimWrapper
from tiny_detr import BATCH, STEPS, VARIANTS, batch, batches, build, config, train, train_by_graphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from visdet.engine import AmpOptimWrapper
from visdet.engine.graphs import methods as cuda_graphs
from visdet.engine.graphs import steps
from visdet.engine.graphs.leaves import leaves_in_place_of, with_leaves
from visdet.engine.graphs.methods import GraphedLoss, GraphedPrediction
from visdet.engine.graphs.steps import GraphedStep
from visdet.engine.optim.gradients import Gradients
from visdet.engine.optim.optim_wrapper import OptimWrapper as OwnOptimWrapper
from visdet.engine.stages import StagedModel
from visdet.execution.tensor_tree import map_tensors
from visdet.ops.fused import suits_autocast_linear
from visdet.structures import DetDataSample


def model_with_dropout(variant, num_cp=-1):
    encoder, decoder = (copy.deepcopy(config()[name]) for name in ("encoder", "decoder"))
    encoder["num_cp"] = num_cp
    for part in (encoder, decoder):
        part["layer_cfg"]["ffn_cfg"]["ffn_drop"] = 0.1
    return build(variant, encoder=encoder, decoder=decoder).cuda()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("variant", "wrapper", "options", "least_rows", "tolerance"),
    [
        ("base", OptimWrapper, {}, None, 1e-3),
        ("two_stage", OptimWrapper, {"accumulative_counts": 3}, None, 1e-3),
        ("refine", AmpOptimWrapper, {}, None, 3e-2),
        ("refine", AmpOptimWrapper, {"accumulative_counts": 2}, 1, 3e-2),
        ("base", AmpOptimWrapper, {"dtype": "float16"}, None, 3e-2),
    ],
)
def test_replayed_steps_are_eager_steps(variant, wrapper, options, least_rows, tolerance, monkeypatch):
    if least_rows is not None:  # as the many rows of real images, which ``autocast_linear`` computes
        monkeypatch.setitem(suits_autocast_linear.__globals__, "_MIN_ROWS", least_rows)
    num_cp = 2 if variant == "base" else -1  # Recomputed layers draw the dropout of the forward pass again.
    if wrapper is AmpOptimWrapper:  # as if the memory did not suffice to keep their activations
        monkeypatch.setattr(steps, "_LEAST_FREE", 2)
    eager, graphed = model_with_dropout(variant, num_cp), model_with_dropout(variant, num_cp)
    expected = train(eager, wrapper, **options)
    losses = train_by_graphs(graphed, wrapper, **options)
    assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    assert_close(
        list(graphed.parameters()),
        list(eager.parameters()),
        rtol=0,
        atol=1e-4 if wrapper is OptimWrapper else 3e-3,
    )


class FakeGraphs(GraphedLoss):
    """Graphs of any shapes without a GPU. ``fails`` names where a capture fails."""

    fails = None

    def __init__(self, monkeypatch, **options):
        generator = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=self.states_put_back)
        self.put_back, self.alive_while_eager = [], []
        monkeypatch.setattr(torch.cuda, "default_generators", [generator])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda_graphs, "GraphMemory", lambda: SimpleNamespace(reserved_bytes=lambda: 0))
        self.said = []
        super().__init__(torch.nn.Linear(1, 1), say=self.said.append, **options)

    def states_put_back(self, state):
        self.put_back.append(state)

    def run(self, shapes):
        for shape in shapes:
            assert self._compute(SimpleNamespace(images=torch.zeros(1, 3)), shape) == "losses"
        return dict(self.counts)

    def _compute_eagerly(self, batch):
        held = getattr(self, "activations", None)
        self.alive_while_eager.append(held is not None and held() is not None)
        return "losses", None

    def _new_step(self, batch, example, memory):
        if self.fails == "trial":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return FakeStep(self)


class FakeStep:
    def __init__(self, owner):
        self.owner = owner

    def capture(self):
        activations = torch.nn.Identity()
        self.owner.activations = weakref.ref(activations)
        if self.owner.fails == "capture":
            raise torch.OutOfMemoryError("CUDA out of memory")

    def __call__(self, batch):
        return "losses"


def test_more_shapes_than_are_kept_do_not_make_each_step_a_capture(monkeypatch):
    counts = FakeGraphs(monkeypatch, max_shapes=1).run("ABABABABABAB")
    assert counts == {"of a new shape": 2, "replayed": 5, "of more shapes than are kept": 5}
    graphs = FakeGraphs(monkeypatch, max_shapes=2)

    def times_said():
        return sum("captured batches" in text for text in graphs.said)

    counts = graphs.run("ABC" * 400)
    assert times_said() == 2 and counts["replayed"] == 798
    counts = graphs.run([("A", "other weights"), ("B", "other weights")] * 5)
    assert times_said() == 4 and counts["replayed"] == 806
    assert all(key[1:] == ("other weights",) for key in graphs._graphs)


@pytest.mark.parametrize("where", ["trial", "capture"])
def test_nothing_is_left_of_an_attempt_that_needs_too_much_memory(where, monkeypatch):
    others, graphs = FakeGraphs(monkeypatch), FakeGraphs(monkeypatch)
    others.run("AA")
    graphs.run("AA")
    assert len(graphs._graphs) == len(others._graphs) == 1
    graphs.fails = where
    counts = graphs.run("BBBA")
    assert counts == {"of a new shape": 2, "replayed": 1, "after a failed capture": 3}
    assert graphs._memory is None and not graphs._graphs and not any(graphs.alive_while_eager)
    assert "cannot be captured, so that all batches run eagerly: CUDA out of memory" in graphs.said[-1]
    # Graphs of other methods hold the state of the generator that the failed capture has left.
    failed_in_capture = where == "capture"
    assert graphs.put_back == ["before"] * failed_in_capture
    assert len(others._graphs) == (0 if failed_in_capture else 1)
    assert (others._memory is None) == failed_in_capture


@pytest.mark.cuda
def test_what_cannot_be_captured_runs_eagerly_and_is_counted(monkeypatch):
    eager, graphed = model_with_dropout("base"), model_with_dropout("base")
    expected = train(eager, OptimWrapper)
    own = type(graphed).losses
    monkeypatch.setattr(
        graphed, "losses", lambda *a: {k: v * (v.item() / v.item()) for k, v in own(graphed, *a).items()}
    )
    said = []
    graphs = GraphedLoss(graphed, say=said.append)
    losses = train(graphed, OptimWrapper, graphs)
    assert graphs.counts == {"of a new shape": 2, "after a failed capture": STEPS - 2}
    assert len(said) == 1 and "a batch of 2 x 3 x 64 x 96 cannot be captured" in said[0]
    assert_close(losses, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
def test_an_autograd_graph_that_is_kept_does_not_prevent_a_capture():
    model = model_with_dropout("base")
    kept = sum(model(**batches()[0], mode="loss").values())
    train_by_graphs(model, OptimWrapper)
    assert kept.requires_grad


def test_gradients_go_to_leaves_that_stand_for_parameters_and_the_parameters_come_back():
    shared = torch.nn.Linear(2, 2)
    tied = torch.nn.Linear(2, 2)
    tied.weight = shared.weight
    model = torch.nn.Sequential(torch.nn.ModuleList([shared, shared]), tied, torch.nn.Linear(2, 2))
    parameters = list(model.parameters())
    leaves = leaves_in_place_of(model)

    def run():
        assert model[0][1].weight is tied.weight is leaves[parameters[0]]
        return model[2](tied(shared(torch.ones(1, 2)))).sum().backward()

    with_leaves(model, leaves, run)
    assert all(leaf.grad is not None for leaf in leaves.values())
    assert all(parameter.grad is None for parameter in parameters)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert tied.weight is shared.weight is parameters[0]
    assert all(leaf.data_ptr() == parameter.data_ptr() for parameter, leaf in leaves.items())


def test_without_a_gpu_steps_are_eager_and_counted():
    model = build("base")
    images, samples = batch()
    expected = model(images, samples, mode="loss")
    graphs = GraphedLoss(model)
    losses = StagedModel(model, {"loss": graphs}).losses(images, samples)
    assert_close(losses, expected, rtol=0, atol=0)
    assert graphs.report() == "graphs of loss: 1 batches, 1 without a GPU; 0 shapes hold 0 MiB"


def images_without_boxes(index, device="cpu"):
    """A batch of one of two shapes, whose samples tell how the original image was scaled."""
    sizes = (BATCH, BATCH) if index % 2 else ((64, 80 - index), (50 + index, 96))
    images, samples = batch(sizes=sizes)
    for number, sample in enumerate(samples):
        sample.set_metainfo({"scale_factor": (0.5 + 0.1 * index, 0.75 + number)})
    return {"inputs": images.to(device) + 0.1 * index, "data_samples": samples}


def predictions(model, data, graphs=None):
    staged = StagedModel(model, graphs and {"predict": graphs})
    samples = staged.predictions(data["inputs"], copy.deepcopy(data["data_samples"]))
    return [sample.pred_instances.clone() for sample in samples]


def assert_same_boxes(found, expected, tolerance):
    for ours, wanted in zip(found, expected, strict=True):
        assert set(ours.keys()) == set(wanted.keys())
        assert torch.equal(ours.labels, wanted.labels)
        assert_close(ours.scores, wanted.scores, rtol=tolerance, atol=tolerance)
        assert_close(ours.bboxes, wanted.bboxes, rtol=tolerance, atol=100 * tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("variant", ["base", "refine", "two_stage", "dino"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replayed_predictions_are_eager_predictions(variant, mode):
    model = build(variant).cuda().eval()
    graphs = GraphedPrediction(model)
    kept = []
    for index in range(10):
        data = images_without_boxes(index, "cuda")
        with mode():
            expected = predictions(model, data)
            found, _ = graphs(data["inputs"], copy.deepcopy(data["data_samples"]))
        kept.append(([sample.pred_instances for sample in found], expected))
        if index == 5:  # training between two validations changes the weights where they lie
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
    assert graphs.counts == {"of a new shape": 2, "replayed": 8}, graphs.report()
    for found, expected in kept:  # at the end: no replay writes over what an earlier one gave
        assert_same_boxes(found, expected, 1e-5)


@pytest.mark.cuda
def test_predictions_under_autocast_have_graphs_of_their_own():
    model = build("base").cuda().eval()
    graphs = GraphedPrediction(model)
    data = images_without_boxes(1, "cuda")
    for enabled in (False, True) * 3:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            expected = predictions(model, data)
            assert_same_boxes(predictions(model, data, graphs), expected, 1e-5)
    assert graphs.counts == {"of a new shape": 2, "replayed": 4}, graphs.report()


@pytest.mark.parametrize("variant", ["base", "refine", "two_stage"])
def test_nothing_in_a_prediction_waits_for_the_device(variant):
    """Numbers of fake tensors do not exist, so that whatever asks for one fails, as a capture would."""
    model = build(variant).eval()
    prepared = model.prediction_batch(**images_without_boxes(0))
    with torch.no_grad():
        expected = model.detections(prepared)  # first: it makes the tables that are kept
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        found = model.detections(map_tensors(fakes.from_tensor, prepared))
    assert {k: (t.shape, t.dtype) for k, t in found.items()} == {
        k: (t.shape, t.dtype) for k, t in expected.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_in_a_step_comes_from_the_host(variant):
    assert not copies_of_losses(build(variant), *batch())


class RecordedStep(GraphedStep):
    """A step whose graphs are Python functions that keep activations in one place, as CUDA graphs do."""

    def __init__(self, weight, memory, gradients=None, handed_on=(), assigns_in_graph=True):
        self.memory, self.model = memory, SimpleNamespace(assign=self.assign, state_after=lambda *_: None)
        self.batch, self.assignment = torch.zeros(2), torch.zeros(1)
        self.outputs, self.assigns_in_graph = None, assigns_in_graph
        self.gradients = gradients or Gradients()
        self.block = self.gradients.block_of([weight])
        self.names, self.handed_on = ["a", "b"], list(handed_on)
        self.values, self.grad_of_losses, self.anchor = torch.zeros(2), torch.zeros(2), torch.zeros(())
        self.anchor.requires_grad_()
        self.handed_gradients = [torch.zeros(2) for _ in self.handed_on]

        def forward():
            memory.activation = weight.detach() * self.batch

        def losses():
            self.values.copy_(memory.activation.square())

        def whole():
            forward()
            losses()

        def backward():
            gradient = 2 * memory.activation * self.batch * self.grad_of_losses
            if self.handed_on:
                self.handed_gradients[0].copy_(gradient)
            else:
                self.block.views[0].add_(gradient)
            memory.activation = torch.full((2,), float("nan"))

        replays = [whole, backward] if assigns_in_graph else [forward, losses, backward]
        self.graphs = [SimpleNamespace(replay=replay) for replay in replays]

    def assign(self, outputs, batch):
        assert not self.assigns_in_graph
        return torch.zeros(1)


def weight_and_input():
    return torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.tensor([3.0, 4.0])


@pytest.mark.parametrize("assigns_in_graph", [True, False])
def test_gradients_of_graphs_add_up_in_one_place(assigns_in_graph):
    weight, x = weight_and_input()
    wrapper = OwnOptimWrapper(torch.optim.SGD([weight], lr=0.5), accumulative_counts=2)
    memory = SimpleNamespace(replays=0)
    step = RecordedStep(weight, memory, wrapper.gradients, assigns_in_graph=assigns_in_graph)
    values = weight.detach()
    gradient = 2 * values * x.square()
    expected = values - 0.5 * (gradient + gradient * 4) / 2
    wrapper.update_params(sum(step(x)[0].values()))
    place = weight.grad.data_ptr()
    assert_close(weight.grad, gradient / 2)
    wrapper.update_params(sum(step(2 * x)[0].values()))
    assert_close(weight.detach(), expected)
    assert weight.grad.data_ptr() == place and not weight.grad.any()
    wrapper.update_params((weight * x).sum())  # an eager step between those of graphs
    assert weight.grad.data_ptr() == place and torch.equal(weight.grad, x / 2)


def test_a_hook_of_a_parameter_sees_and_changes_its_gradient():
    weight, x = weight_and_input()
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient) or 10 * gradient)
    step = RecordedStep(weight, SimpleNamespace(replays=0), handed_on=[weight])
    for count in (1, 2):
        sum(step(x)[0].values()).backward()
        assert_close(weight.grad, count * 20 * weight.detach() * x.square())
    assert len(seen) == 2


def test_a_backward_after_another_replay_is_refused():
    weight, x = weight_and_input()
    memory = SimpleNamespace(replays=0)
    one, other = RecordedStep(weight, memory), RecordedStep(weight, memory)
    sum(one(x)[0].values()).backward()
    assert_close(weight.grad, 2 * weight.detach() * x.square())
    for next_step in (one, other):
        before, after = one(x)[0], next_step(2 * x)[0]
        with pytest.raises(RuntimeError, match="must run once, and before the next step"):
            sum(before.values()).backward()
        sum(after.values()).backward()
    losses, _ = one(x)
    losses["a"].backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="must run once"):
        losses["b"].backward()
    with pytest.raises(RuntimeError, match="create_graph"):
        one(x)[0]["a"].backward(create_graph=True)


@pytest.mark.cuda
def test_replays_outlive_the_tables_that_the_model_keeps():
    model = build("base").cuda().eval()
    graphs = GraphedPrediction(model)
    data = images_without_boxes(1, "cuda")
    with torch.no_grad():
        expected = predictions(model, data)
        for _ in range(2):
            predictions(model, data, graphs)
        for height in range(64, 64 + 70):  # more sizes than the model keeps tables of
            images = torch.randn(1, 3, height, 96, device="cuda")
            predictions(model, {"inputs": images, "data_samples": [DetDataSample()]}, graphs)
        assert_same_boxes(predictions(model, data, graphs), expected, 1e-5)
    assert graphs.counts == {"of a new shape": 71, "replayed": 2}, graphs.report()
