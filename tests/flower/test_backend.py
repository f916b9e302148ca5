"""The backend against nodes that lie, with a courier that answers at once."""

import dataclasses
import json
import math
import re

import pytest
import torch

from exitflow.errors import TrainingError
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.types import Missing, Update
from exitflow.flower.backend import FlowerBackend
from exitflow.flower.courier import Reply, Station, registered
from exitflow.flower.worker import Worker
from exitflow.system.assembly import Assembly
from exitflow.tensors import num_bytes, pack, take, unpack
from tests.small import image_dataset, task_of, tiny_system

NODES = ["device-0", "device-1", "cloud-0"]


class Courier:
    """Hands messages straight to workers; `spoil` may change what they answer."""

    def __init__(self, trainer, spoil=lambda node, header, payload: (header, payload)):
        self.workers = {node: Worker(node, lambda header: trainer) for node in NODES}
        self.spoil = spoil
        self.sent, self.count = {}, 0

    def stations(self):
        return [Station(index, node, "key", True) for index, node in enumerate(NODES)]

    def send(self, station, header, payload, *, seconds):
        self.count += 1
        self.sent[f"m{self.count}"] = (NODES[station], json.loads(json.dumps(header)), payload)
        return f"m{self.count}"

    def receive(self, messages):
        replies = []
        for message in sorted(messages, reverse=True):  # the last first
            if message not in self.sent:
                continue
            node, header, payload = self.sent.pop(message)
            header, payload = self.workers[node].answer(header, payload)
            spoiled = self.spoil(node, json.loads(json.dumps(header)), payload)
            if spoiled is not None:
                replies.append(Reply(message, *spoiled))
        return replies

    def close(self):
        pass


def run(tmp_path, spoil=None, overrides=(), rounds=(1,), **spec):
    system = tiny_system(*overrides)
    assembly = Assembly(system, image_dataset(96))
    courier = Courier(
        assembly.trainer(tmp_path / "run" / "nodes"), spoil or (lambda node, header, payload: (header, payload))
    )
    keys = dict.fromkeys(NODES, "key")
    federation = dataclasses.replace(system.federation, **{"deadline": 0.3, **spec})
    coverage, samples = assembly.model.coverage, assembly.samples
    backend = FlowerBackend(courier, lambda: registered(courier, keys), coverage, "r", samples, spec=federation)
    state, found = assembly.initial_state(), {}
    for round in rounds:
        tasks = [
            task_of(round, "cloud-0", 3, 1.0, round),
            task_of(round, "device-0", 1, 1.0, 2),
            task_of(round, "device-1", 1, 1.0, 3),
        ]
        found = {each.task.node: each for each in backend.run(state, tasks)}
    return found, assembly, state, backend


def test_updates_come_in_the_order_of_the_tasks_with_the_bits_of_serial(tmp_path):
    found, assembly, state, _ = run(tmp_path)
    assert list(found) == ["cloud-0", "device-0", "device-1"]
    trainer = assembly.trainer(tmp_path / "other" / "nodes")
    for update in found.values():
        expected = trainer.train(state, update.task)
        assert all(torch.equal(update.delta[name], expected.delta[name]) for name in expected.delta)
        assert all(torch.equal(update.buffers[name], expected.buffers[name]) for name in expected.buffers)
        assert (update.num_samples, update.num_steps, update.losses) == (
            expected.num_samples,
            expected.num_steps,
            expected.losses,
        )


def test_a_node_gets_and_returns_only_what_its_exit_covers(tmp_path):
    seen = {}

    def look(node, header, payload):
        seen[node] = set(unpack(payload))
        return header, payload

    found, assembly, _, _ = run(tmp_path, look)
    for node, exit in (("cloud-0", 3), ("device-0", 1)):
        assert seen[node] == set(assembly.model.coverage(exit))
    down, up = found["device-0"].wire_bytes
    covered = num_bytes(take(assembly.initial_state().tensors, assembly.model.coverage(1)))
    assert covered < down < covered + 3000
    assert covered < up < covered + 3000


def with_tensors(change):
    def spoil(node, header, payload):
        if node != "device-0":
            return header, payload
        tensors = unpack(payload)
        change(tensors)
        return header, pack(tensors)

    return spoil


def resize(tensors):
    name = next(iter(tensors))
    tensors[name] = torch.zeros(7)


def retype(tensors):
    name = next(iter(tensors))
    tensors[name] = tensors[name].double()


def enlarge(tensors):
    for name in tensors:
        tensors[name] = tensors[name] * 1e4


def with_header(**fields):
    return lambda node, header, payload: ({**header, **fields} if node == "device-0" else header, payload)


ENDLESS = json.dumps({"w": {"dtype": "F32", "shape": [0, 2**62, 8], "data_offsets": [0, 0]}}).encode()
ENDLESS = len(ENDLESS).to_bytes(8, "little") + ENDLESS  # nothing, of a shape that no number holds
OLD = json.loads(json.dumps(dataclasses.asdict(task_of(1, "device-0", 1, 1.0, 9))))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_tensors(resize), "has shape [7] instead of"),
        (with_tensors(retype), "is torch.float64 instead of torch.float32"),
        (with_tensors(lambda tensors: tensors.update(extra=torch.zeros(1))), "'extra' was not asked for"),
        (with_tensors(lambda tensors: tensors.pop(next(iter(tensors)))), "is missing"),
        (with_tensors(enlarge), "times as large as is usual"),
        (with_header(task=OLD), "it answers another task"),
        (with_header(run="another"), "it answers another task"),
        (with_header(num_samples=-5), "num_samples is -5"),
        (with_header(num_samples=2**30), "num_samples is 1073741824, and was 8 when the run began"),
        (with_header(num_samples=True), "num_samples is True"),
        (with_header(num_steps="many"), "num_steps is 'many'"),
        (with_header(state_round="x"), "state_round is 'x'"),
        (with_header(losses=[1.7e308]), "losses are (1.7e+308,)"),
        (lambda node, header, payload: (header, ENDLESS if node == "device-0" else payload), "cannot be read"),
        (with_header(state_round=-1), "state_round is -1"),
        (lambda node, *found: ({}, b"", "no JSON", True) if node == "device-0" else found, "no JSON"),
        (lambda node, header, payload: (header, payload[:50] if node == "device-0" else payload), "cannot be read"),
        (lambda node, header, payload: (header, b"" if node == "device-0" else payload), "cannot be read"),
        (lambda node, header, payload: ({"task": 5} if node == "device-0" else header, payload), "another task"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_believed_is_refused_and_the_others_count(spoil, reason, tmp_path):
    found, *_ = run(tmp_path, spoil)
    assert isinstance(found["device-0"], Missing)
    assert found["device-0"].refused
    assert reason in found["device-0"].reason
    assert isinstance(found["device-1"], Update)
    assert isinstance(found["cloud-0"], Update)


def test_a_node_that_does_not_answer_is_missing_after_the_deadline(tmp_path):
    found, *_ = run(tmp_path, lambda node, header, payload: None if node == "cloud-0" else (header, payload))
    assert found["cloud-0"].reason == "no answer within 0.3 s"
    assert not found["cloud-0"].refused
    assert found["cloud-0"].wire_bytes[1] == 0
    assert isinstance(found["device-0"], Update)


def test_an_error_on_a_node_is_told_with_its_own_words(tmp_path):
    found, *_ = run(
        tmp_path, lambda node, header, payload: ({"error": "disk full"} if node == "device-1" else header, payload)
    )
    assert found["device-1"].reason == "disk full"


def test_a_node_with_another_key_is_not_let_in():
    class Three:
        def stations(self):
            return [Station(1, "a", "right", True), Station(2, "a", "wrong", True), Station(3, "b", "right", True)]

    assert registered(Three(), {"a": "right"}) == {"a": 1}


@pytest.mark.parametrize("kind", ["fp16", "int8", "top-k"])
def test_compressed_updates_arrive_as_they_were_rounded(kind, tmp_path):
    found, assembly, state, _ = run(tmp_path, overrides=[f"federation.compression={kind}"], compression=kind)
    plain, *_ = run(tmp_path / "plain")
    trainer = assembly.trainer(tmp_path / "other" / "nodes")
    for node, update in found.items():
        expected = trainer.train(state, update.task)
        assert all(torch.equal(update.delta[name], expected.delta[name]) for name in expected.delta)
        assert update.wire_bytes[1] < plain[node].wire_bytes[1] or kind != "fp16"  # tensors are tiny here


def test_gradients_are_measured_on_the_node(tmp_path):
    _, assembly, state, backend = run(tmp_path)
    pairs = [("device-0", 1), ("cloud-0", 3)]
    trainer = assembly.trainer(tmp_path / "other" / "nodes")
    assert backend.measure_gradients(state, pairs) == [trainer.measure_gradients(state, *pair) for pair in pairs]


@pytest.mark.parametrize("name", ["mean_variance", "variance", "second_moment", "loss"])
@pytest.mark.parametrize("value", [1e300, -1e-9, float("nan"), float("inf"), "1", True, None, [1]], ids=str)
def test_gradients_that_cannot_be_believed_are_missing_and_the_node_is_named(name, value, tmp_path, caplog):
    pairs = [("device-0", 1), ("device-1", 1)]
    _, assembly, state, backend = run(tmp_path, rounds=(), on_missing="skip")
    backend.courier.spoil = with_header(**{name: value})
    lied, honest = backend.measure_gradients(state, pairs)
    assert all(math.isnan(figure) for figure in dataclasses.astuple(lied))
    assert honest == assembly.trainer(tmp_path / "other" / "nodes").measure_gradients(state, *pairs[1])
    problem = f"node 'device-0': its gradients at exit 1 are missing: {name} is {value!r}"
    assert caplog.messages == [problem]
    strict = dataclasses.replace(backend, spec=dataclasses.replace(backend.spec, on_missing="strict"))
    with pytest.raises(TrainingError, match=f"^{re.escape(problem)}; federation.on_missing = 'skip' or 'reweight'"):
        strict.measure_gradients(state, pairs)


def test_gradients_of_a_node_with_too_little_data_are_no_lie(tmp_path, caplog):
    unknown = dict.fromkeys(("mean_variance", "variance", "second_moment", "loss"), float("nan"))
    _, _, state, backend = run(tmp_path, with_header(**unknown), rounds=())
    (found,) = backend.measure_gradients(state, [("device-0", 1)])
    assert all(math.isnan(figure) for figure in dataclasses.astuple(found))
    assert not caplog.messages


def test_gradients_of_a_node_that_does_not_answer_are_missing(tmp_path):
    _, _, state, backend = run(tmp_path, lambda *found: None, rounds=())
    with pytest.raises(TrainingError, match="node 'device-0': its gradients at exit 1 are missing: no answer within"):
        backend.measure_gradients(state, [("device-0", 1)])


def test_a_worker_refuses_a_task_of_another_node(tmp_path):
    assembly = Assembly(tiny_system(), image_dataset(96))
    worker = Worker("device-0", lambda header: assembly.trainer(tmp_path / "nodes"))
    header, _ = worker.answer({"kind": "train", "task": dataclasses.asdict(task_of(1, "device-1", 1, 1.0, 0))}, b"")
    assert header["error"] == "the task is for node 'device-1', this is 'device-0'"
    assert "no message of kind" in worker.answer({"kind": "dance"}, b"")[0]["error"]
    assert "KeyError" in worker.answer({}, b"")[0]["error"]


def test_status_names_those_that_are_waited_for(tmp_path):
    told = []
    _, _, state, backend = run(tmp_path, lambda node, header, payload: None if node == "cloud-0" else (header, payload))
    patient = dataclasses.replace(backend, status=told.append, spec=FederationSpec(deadline=0.3))
    list(patient.run(state, [task_of(1, "cloud-0", 3, 1.0, 1)]))
    assert "waiting for cloud-0" in told


def test_a_diverged_node_is_dropped_with_compression_too(tmp_path):
    found, *_ = run(tmp_path, overrides=("training.learning_rate=1e30", "federation.compression=int8"))
    delta = found["cloud-0"].delta
    assert not all(torch.isfinite(tensor).all() for tensor in delta.values())


def test_a_scale_that_would_fill_the_memory_is_refused_before_it_is_used(tmp_path):
    def enlarge_scale(tensors):
        name = next(name for name in tensors if name.endswith("scale"))
        tensors[name] = torch.ones(100, 1, 1, 1, 1)

    spoil = with_tensors(enlarge_scale)
    found, *_ = run(tmp_path, spoil, overrides=("federation.compression=int8",))
    assert "has a scale of shape [100, 1, 1, 1, 1]" in found["device-0"].reason
    assert isinstance(found["device-1"], Update)


def test_where_updates_get_noise_none_is_refused_for_its_size(tmp_path):
    found, *_ = run(tmp_path, with_tensors(enlarge), clip_norm=1.0, noise_multiplier=1.0)
    assert isinstance(found["device-0"], Update)
    found, *_ = run(tmp_path, with_tensors(enlarge), clip_norm=1.0)
    assert found["device-0"].refused
    assert found["device-0"].wire_bytes[1] > 0
