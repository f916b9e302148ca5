"""Clients of the Open Inference Protocol that we did not write, against a running node."""

import asyncio
import json

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from tests.serving.inprocess import http
from tests.serving.small import INPUT_SHAPE, NUM_CLASSES

pytestmark = pytest.mark.heavy


@pytest.fixture
def inputs(bundle):
    return bundle.samples().inputs[:3]


def place(tree, node="device-0"):
    return tree.places[node]


def check_answer(answer, bundle):
    scores = answer.as_numpy("scores")
    assert scores.shape == (3, NUM_CLASSES)
    assert np.allclose(scores.sum(axis=1), 1, atol=1e-5)
    exits = answer.as_numpy("exit")
    nodes = [name if isinstance(name, str) else name.decode() for name in answer.as_numpy("node")]
    assert [bundle.node(name).exit for name in nodes] == exits.tolist()
    logits = bundle.samples().outputs.logits
    assert scores.argmax(axis=1).tolist() == [int(logits[exit - 1][row].argmax()) for row, exit in enumerate(exits)]
    assert answer.as_numpy("confidence").shape == (3,)


def test_tritons_grpc_client(bundle, tree, inputs):
    name = bundle.manifest.name
    with tritonclient.grpc.InferenceServerClient(place(tree).grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, bundle.version)
        assert not client.is_model_ready(name, "nonsense")
        assert not client.is_model_ready("nonsense")
        assert client.get_server_metadata().name == "exitflow"
        metadata = client.get_model_metadata(name)
        assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [
            ("input", "UINT8", [-1, *INPUT_SHAPE])
        ]
        assert [each.name for each in metadata.outputs] == ["scores", "exit", "node", "confidence"]
        config = client.get_model_config(name).config
        assert (config.max_batch_size, list(config.input[0].dims)) == (1024, list(INPUT_SHAPE))
        tensor = tritonclient.grpc.InferInput("input", [3, *INPUT_SHAPE], "UINT8")
        tensor.set_data_from_numpy(inputs)
        answer = client.infer(name, [tensor], request_id="77", client_timeout=10)
        check_answer(answer, bundle)
        assert answer.get_response().id == "77"
        wanted = [tritonclient.grpc.InferRequestedOutput("exit")]
        only = client.infer(name, [tensor], outputs=wanted, model_version=bundle.version)
        assert only.as_numpy("scores") is None
        assert only.as_numpy("exit").shape == (3,)
        statistics = client.get_inference_statistics(name).model_stats[0]
        assert statistics.inference_count >= 6
        assert statistics.inference_stats.success.count >= 2
        assert client.get_model_repository_index().models[0].state == "READY"


def test_tritons_asynchronous_grpc_client(bundle, tree, inputs):
    async def scenario():
        async with tritonclient.grpc.aio.InferenceServerClient(place(tree).grpc) as client:
            tensor = tritonclient.grpc.aio.InferInput("input", [3, *INPUT_SHAPE], "UINT8")
            tensor.set_data_from_numpy(inputs)
            check_answer(await client.infer(bundle.manifest.name, [tensor]), bundle)

    asyncio.run(scenario())


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritons_http_client(bundle, tree, inputs, binary, compression):
    name = bundle.manifest.name
    with tritonclient.http.InferenceServerClient(place(tree).http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(name)
        assert client.get_server_metadata()["name"] == "exitflow"
        assert client.get_model_metadata(name)["versions"] == [bundle.version]
        config = client.get_model_config(name)
        assert (config["max_batch_size"], config["input"][0]["data_type"]) == (1024, "TYPE_UINT8")
        tensor = tritonclient.http.InferInput("input", [3, *INPUT_SHAPE], "UINT8")
        tensor.set_data_from_numpy(inputs, binary_data=binary)
        names = ("scores", "exit", "node", "confidence")
        outputs = [tritonclient.http.InferRequestedOutput(each, binary_data=binary) for each in names]
        answer = client.infer(
            name,
            [tensor],
            outputs=outputs,
            request_id="77",
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
        check_answer(answer, bundle)
        assert answer.get_response()["id"] == "77"
        check_answer(client.infer(name, [tensor]), bundle)
        assert client.get_inference_statistics(name)["model_stats"][0]["inference_count"] >= 6
        assert client.get_inference_statistics()["model_stats"][0]["name"] == name


@pytest.mark.parametrize(("triton", "kind"), [(tritonclient.grpc, "grpc"), (tritonclient.http, "http")])
def test_what_would_change_the_answer_and_is_not_there_is_refused(bundle, tree, inputs, triton, kind):
    tensor = triton.InferInput("input", [3, *INPUT_SHAPE], "UINT8")
    tensor.set_data_from_numpy(inputs)
    wanted = [triton.InferRequestedOutput("scores", class_count=2)]
    with (
        triton.InferenceServerClient(getattr(place(tree), kind)) as client,
        pytest.raises(triton.InferenceServerException, match="cannot have the parameter 'classification' here"),
    ):
        client.infer(bundle.manifest.name, [tensor], outputs=wanted)


def test_a_client_that_asks_wrongly_is_told_so(bundle, tree):
    tensor = tritonclient.grpc.InferInput("input", [1, 5], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, 5), dtype=np.uint8))
    with (
        tritonclient.grpc.InferenceServerClient(place(tree).grpc) as client,
        pytest.raises(tritonclient.grpc.InferenceServerException, match=r"the shape of 'input' is \[N, 1, 4, 4\]"),
    ):
        client.infer(bundle.manifest.name, [tensor])
    tensor = tritonclient.http.InferInput("input", [1, 5], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, 5), dtype=np.uint8))
    with (
        tritonclient.http.InferenceServerClient(place(tree).http) as client,
        pytest.raises(tritonclient.http.InferenceServerException, match="the shape of 'input'"),
    ):
        client.infer(bundle.manifest.name, [tensor])


def get(tree, path, node="device-0"):
    status, _, text = http(place(tree, node).http, "GET", path)
    assert status == 200
    return text


def test_health_metrics_and_status(bundle, tree):
    assert json.loads(get(tree, "/healthz")) == {"live": True}
    ready = json.loads(get(tree, "/readyz"))
    assert ready == {"ready": True, "degraded": False, "problems": [], "node": "device-0"}
    metrics = get(tree, "/metrics")
    assert f'bundle="{bundle.version}"' in metrics
    for name in ("arrived_total", "served_total", "link_forwarded_total", "request_seconds_bucket", "link_up"):
        assert f"exitflow_{name}" in metrics
    status = json.loads(get(tree, "/status", "cloud-0"))
    assert status["node"] == "cloud-0"
    assert status["exit"] == 3


def test_what_is_not_there_is_a_404_and_another_method_a_405(tree):
    assert http(place(tree).http, "GET", "/nonsense")[0] == 404
    status, headers, _ = http(place(tree).http, "DELETE", "/healthz")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert http(place(tree).http, "HEAD", "/healthz")[0] == 200


def test_clients_may_not_pretend_to_be_nodes_over_http(bundle, tree):
    body = {"inputs": [], "parameters": {"exitflow_from": "device-1"}}
    body["inputs"] = [{"name": "input", "shape": [1, *INPUT_SHAPE], "datatype": "UINT8", "data": [0] * 16}]
    path = f"/v2/models/{bundle.manifest.name}/infer"
    status, _, text = http(place(tree).http, "POST", path, json.dumps(body).encode())
    assert status == 400
    assert "only nodes may forward" in text
