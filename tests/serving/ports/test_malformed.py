"""Requests that make no sense get one sentence, and the node goes on."""

import asyncio
import gzip
import json

import grpc
import numpy as np
import pytest

from exitflow.serving.wire.messages import SERVICE, ModelInferRequest
from tests.serving.asking import message
from tests.serving.inprocess import http, running
from tests.serving.small import FEATURES, INPUT_SHAPE, NUM_CLASSES, make_bundle

pytestmark = pytest.mark.heavy


def no_input(request):
    del request.inputs[:]


def two_inputs(request):
    request.inputs.add().CopyFrom(request.inputs[0])


def wrong_name(request):
    request.inputs[0].name = "image"


def wrong_datatype(request):
    request.inputs[0].datatype = "FP32"


def wrong_shape(request):
    request.inputs[0].shape[:] = [1, 16]


def no_samples(request):
    request.inputs[0].shape[:] = [0, *INPUT_SHAPE]
    request.raw_input_contents[0] = b""


def negative_shape(request):
    request.inputs[0].shape[:] = [-1, *INPUT_SHAPE]


def huge_shape(request):
    request.inputs[0].shape[:] = [2**62, *INPUT_SHAPE]


def too_many_samples(request):
    request.inputs[0].shape[:] = [2000, *INPUT_SHAPE]
    request.raw_input_contents[0] = bytes(2000 * 16)


def truncated(request):
    request.raw_input_contents[0] = request.raw_input_contents[0][:-1]


def too_long(request):
    request.raw_input_contents[0] += b"x"


def two_contents(request):
    request.raw_input_contents.append(b"x")


def no_contents(request):
    del request.raw_input_contents[:]


def too_large_numbers(request):
    del request.raw_input_contents[:]
    request.inputs[0].contents.uint_contents[:] = [256] * 16


def unknown_output(request):
    request.outputs.add(name="logits")


def strange_timeout(request):
    request.parameters["timeout"].string_param = "soon"


def many_outputs(request):
    for _ in range(17):
        request.outputs.add(name="exit")


def unknown_child(request):
    request.parameters["exitflow_from"].string_param = "nobody"


def features_of_a_client(request):
    request.inputs[0].name = "features"


SENTENCES = {
    no_input: "a request has one input tensor, named 'input'; got 0",
    two_inputs: "a request has one input tensor, named 'input'; got 2",
    wrong_name: "the input tensor is named 'input', got 'image'",
    wrong_datatype: "the datatype of 'input' is UINT8, got 'FP32'",
    wrong_shape: "the shape of 'input' is [N, 1, 4, 4] with N from 1, got [1, 16]",
    no_samples: "with N from 1, got [0, 1, 4, 4]",
    negative_shape: "with N from 1, got [-1, 1, 4, 4]",
    huge_shape: "a request has at most 1024 samples, got 4611686018427387904",
    too_many_samples: "a request has at most 1024 samples, got 2000",
    truncated: "'input' of shape [1, 1, 4, 4] takes 16 bytes, got 15",
    too_long: "'input' of shape [1, 1, 4, 4] takes 16 bytes, got 17",
    two_contents: "every input tensor needs one raw content, got 2 for 1",
    no_contents: "'input' needs 16 numbers for its shape, got 0",
    too_large_numbers: "must be whole numbers from 0 to 255",
    unknown_output: "there is no output 'logits'",
    strange_timeout: "timeout must be a whole number of microseconds below 2^63, got 'soon'",
    many_outputs: "a request names at most 16 outputs, got 17",
    unknown_child: "there is no node 'nobody'",
    features_of_a_client: "'features' come from nodes; clients send 'input'",
}


async def call(place, request):
    async with grpc.aio.insecure_channel(place) as channel:
        return await channel.unary_unary(f"/{SERVICE}/ModelInfer")(request.SerializeToString(), timeout=10)


@pytest.mark.parametrize(("spoil", "sentence"), SENTENCES.items(), ids=[spoil.__name__ for spoil in SENTENCES])
def test_grpc(bundle, tree, spoil, sentence):
    request = message(bundle)
    spoil(request)

    async def scenario():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(tree.places["device-0"].grpc, request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in caught.value.details()
        assert await call(tree.places["device-0"].grpc, message(bundle))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "code"),
    [({"model_name": "other"}, "NOT_FOUND"), ({"model_version": "abc"}, "NOT_FOUND")],
)
def test_what_is_not_here_is_not_found(bundle, tree, change, code):
    request = message(bundle)
    for key, value in change.items():
        setattr(request, key, value)

    async def scenario():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(tree.places["device-0"].grpc, request)
        assert caught.value.code().name == code

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_floats_must_be_finite(tmp_path, value):
    bundle = make_bundle(tmp_path / "b", floats=True)

    async def scenario():
        async with running(bundle, "device-0") as (node, place):
            inputs = bundle.samples().inputs[:1].copy()
            request = ModelInferRequest(model_name="small")
            request.inputs.add(name="input", datatype="FP32", shape=inputs.shape)
            request.raw_input_contents.append(inputs.tobytes())
            assert await call(place, request)
            inputs[0, 0, 0, 0] = value
            request.raw_input_contents[0] = inputs.tobytes()
            with pytest.raises(grpc.aio.AioRpcError, match="'input' holds NaN or infinity"):
                await call(place, request)
            assert node.counts.invalid == 1

    asyncio.run(scenario())


def forwarded(bundle, **parameters):
    request = ModelInferRequest(model_name="small", model_version=bundle.hash)
    request.inputs.add(name="features", datatype="FP32", shape=[1, FEATURES])
    request.inputs.add(name="logits", datatype="FP32", shape=[1, NUM_CLASSES])
    request.raw_input_contents.extend(np.ones(size, dtype="<f4").tobytes() for size in (FEATURES, NUM_CLASSES))
    request.parameters["exitflow_from"].string_param = "device-0"
    for name, value in ({"exit": 1} | parameters).items():
        kind = {int: "int64_param", str: "string_param", bool: "bool_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"exit": 2}, "takes features of exits 1 to 1, got 2"),
        ({"exit": 0}, "takes features of exits 1 to 1, got 0"),
        ({"exit": "1"}, "takes features of exits 1 to 1, got '1'"),
        ({"codec": "u16"}, "codec must be one of fp32, fp16, u8, u4, got 'u16'"),
        ({"codec": "u8"}, "u8 features of shape [1, 6] take 14 bytes, got 24"),
        ({"compress": True}, "compressed features cannot be read"),
    ],
)
def test_forwarded_features_are_checked_like_everything_else(bundle, tree, parameters, sentence):
    async def scenario():
        assert await call(tree.places["edge-0"].grpc, forwarded(bundle))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(tree.places["edge-0"].grpc, forwarded(bundle, **parameters))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in caught.value.details()

    asyncio.run(scenario())


def no_logits(request):
    del request.inputs[1], request.raw_input_contents[1]


def logits_of_two(request):
    request.inputs[1].shape[:] = [2, NUM_CLASSES]


def short_logits(request):
    request.raw_input_contents[1] = request.raw_input_contents[1][:-1]


def something_else(request):
    request.inputs[1].name = "features"


def wrong_kind(request):
    request.inputs[1].datatype = "INT32"


def no_number(request):
    request.raw_input_contents[1] = np.full(NUM_CLASSES, np.nan, dtype="<f4").tobytes()


def one_content(request):
    del request.raw_input_contents[1]


def three_tensors(request):
    request.inputs.add().CopyFrom(request.inputs[1])


def beside_an_input(request):
    request.inputs[0].name = "input"


LOGITS = "'features' come with 'logits': raw FP32 of shape [1, 4]"


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (no_logits, LOGITS),
        (logits_of_two, LOGITS),
        (short_logits, LOGITS),
        (something_else, LOGITS),
        (wrong_kind, LOGITS),
        (no_number, "'logits' holds NaN or infinity"),
        (one_content, "every input tensor needs one raw content, got 1 for 2"),
        (three_tensors, "a request has one input tensor, named 'input'; got 3"),
        (beside_an_input, "beside 'input' there is no other input tensor, got 'logits'"),
    ],
)
def test_the_logits_that_come_with_features_are_checked_too(bundle, tree, break_it, sentence):
    async def scenario():
        request = forwarded(bundle)
        assert await call(tree.places["edge-0"].grpc, request)
        break_it(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(tree.places["edge-0"].grpc, request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in caught.value.details()

    asyncio.run(scenario())


TENSOR = {"name": "input", "shape": [1, *INPUT_SHAPE], "datatype": "UINT8", "data": [1] * 16}
BODIES = {
    "": "the body is not valid JSON",
    "[]": "the body must be a JSON object",
    "[" * 5000: "the body is not valid JSON",
    "{}": "'inputs' must be a list of one tensor",
    '{"inputs": [1]}': "'inputs' must be a list of one tensor",
    json.dumps({"inputs": [TENSOR | {"name": 5}]}): "a tensor needs a 'name' and a 'datatype'",
    json.dumps({"inputs": [TENSOR | {"shape": "1"}]}): "'shape' must be a list of whole numbers",
    json.dumps({"inputs": [TENSOR | {"shape": [1, True]}]}): "'shape' must be a list of whole numbers",
    json.dumps({"inputs": [TENSOR | {"data": 5}]}): "'data' must be a list of numbers",
    json.dumps({"inputs": [TENSOR | {"data": ["1"] * 16}]}): "'data' must be a list of numbers",
    json.dumps({"inputs": [TENSOR | {"data": [1.5] * 16}]}): "must be whole numbers from 0 to 255",
    json.dumps({"inputs": [TENSOR | {"data": [1] * 15}]}): "'input' needs 16 numbers for its shape, got 15",
    json.dumps({"inputs": [TENSOR | {"data": [1] * 17}]}): "'data' holds more than the 16 numbers of its shape",
    json.dumps({"inputs": [TENSOR | {"data": [float("nan")] * 16}]}): "the body is not valid JSON",
    json.dumps({"inputs": [TENSOR], "id": 5}): "'id' must be a string",
    json.dumps({"inputs": [TENSOR], "outputs": 5}): "'outputs' must be a list of tensors with a 'name'",
    json.dumps({"inputs": [TENSOR], "outputs": [{"name": "x"}]}): "there is no output 'x'",
    json.dumps({"inputs": [TENSOR], "parameters": 5}): "'parameters' must be a JSON object",
    json.dumps({"inputs": [TENSOR], "parameters": {"timeout": -1}}): "timeout must be a whole number",
    json.dumps({"inputs": [TENSOR], "parameters": {"timeout": 10**400}}): "timeout must be a whole number",
    json.dumps(
        {"inputs": [TENSOR | {"parameters": {"binary_data_size": 3}}]}
    ): "binary_data_size is 3, but 0 bytes follow",
}


@pytest.mark.parametrize(("body", "sentence"), BODIES.items(), ids=range(len(BODIES)))
def test_rest(bundle, tree, body, sentence):
    path = f"/v2/models/{bundle.manifest.name}/infer"
    status, _, text = http(tree.places["device-0"].http, "POST", path, body)
    assert status == 400
    assert sentence in json.loads(text)["error"]


def test_rest_takes_nested_data_and_refuses_strange_headers(bundle, tree):
    place, path = tree.places["device-0"].http, f"/v2/models/{bundle.manifest.name}/infer"
    nested = np.ones((1, *INPUT_SHAPE), dtype=int).tolist()
    body = json.dumps({"inputs": [TENSOR | {"data": nested}]})
    assert http(place, "POST", path, body)[0] == 200
    assert http(place, "POST", path, gzip.compress(body.encode()), {"Content-Encoding": "gzip"})[0] == 200
    assert http(place, "POST", path, body, {"Content-Encoding": "gzip"})[0] == 400
    assert http(place, "POST", path, body, {"Content-Encoding": "br"})[0] == 400
    for length in ("-1", "x", "9999999"):
        status, _, text = http(place, "POST", path, body, {"Inference-Header-Content-Length": length})
        assert status == 400
        assert "inference-header-content-length must be at most" in text


def test_a_body_that_unpacks_to_more_than_a_request_may_have_is_413(bundle, tree):
    bomb = gzip.compress(bytes(70_000_000))
    path = f"/v2/models/{bundle.manifest.name}/infer"
    assert http(tree.places["device-0"].http, "POST", path, bomb, {"Content-Encoding": "gzip"})[0] == 413


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_length_of_many_digits_is_refused(bundle, tree, digits):
    path = f"/v2/models/{bundle.manifest.name}/infer"
    headers = {"Inference-Header-Content-Length": "9" * digits}
    status, _, text = http(tree.places["device-0"].http, "POST", path, b"{}", headers)
    assert (status, "must be at most the 2 bytes" in text) == (400, True)


def test_json_that_would_hold_the_node_up_is_refused(bundle, tree):
    path = f"/v2/models/{bundle.manifest.name}/infer"
    place = tree.places["device-0"].http
    head = '{"inputs": [{"name": "input", "datatype": "UINT8", "shape": [1, 1, 4, 4], "data": ['
    status, _, text = http(place, "POST", path, head + ",".join(["[]"] * 300) + "]}]}")
    assert (status, "more lists than the shape" in text) == (400, True)
    dimensions = json.dumps({"inputs": [TENSOR | {"shape": [2**31 - 1] * 2000}]})
    status, _, text = http(place, "POST", path, dimensions)
    assert (status, "'shape' must be a list of whole numbers, 16 at most" in text) == (400, True)
    status, _, text = http(place, "POST", path, head + ",".join(["[]"] * 300_000) + "]}]}")
    assert (status, "the JSON of a request has at most" in text) == (413, True)


def test_a_timeout_that_has_passed_is_a_504(bundle, tree):
    body = json.dumps({"inputs": [TENSOR], "parameters": {"timeout": 1}})
    status, _, text = http(tree.places["cloud-0"].http, "POST", f"/v2/models/{bundle.manifest.name}/infer", body)
    assert status == 504
    assert "deadline" in text
