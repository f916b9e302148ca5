"""Whatever is sent, a node answers with an answer or a sentence, and goes on: no crash, no INTERNAL, no 500."""

import asyncio
from collections import Counter

import grpc
import pytest
import schemathesis
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from exitflow.serving.wire.messages import SERVICE, ModelInferRequest
from tests.serving.inprocess import http
from tests.serving.small import INPUT_SHAPE

pytestmark = pytest.mark.heavy

FINE = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
EXAMPLES = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def channel(tree):
    with grpc.insecure_channel(tree.places["edge-0"].grpc) as opened:
        yield opened


def check(channel, data, method="ModelInfer"):
    """The code of the call; the node must live."""
    try:
        channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=10)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


parameters = st.dictionaries(
    st.sampled_from(["timeout", "exitflow_from", "exit", "codec", "compress", "other"]) | st.text(max_size=5),
    st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | st.booleans() | st.sampled_from(["device-0", "u8", 1]),
    max_size=4,
)


@st.composite
def requests(draw):
    request = ModelInferRequest(
        model_name=draw(st.sampled_from(["small", "small", "small", "", "other"])),
        model_version=draw(st.sampled_from(["", "", "", "1"])),
        id=draw(st.text(max_size=5)),
    )
    for name, value in draw(parameters).items():
        kind = {int: "int64_param", str: "string_param", bool: "bool_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2]))):
        tensor = request.inputs.add(
            name=draw(st.sampled_from(["input", "input", "input", "features", ""])),
            datatype=draw(st.sampled_from(["UINT8", "UINT8", "FP32", "BYTES", ""])),
        )
        right = st.just([1, *INPUT_SHAPE]) | st.just([3, *INPUT_SHAPE]) | st.just([1, 6])
        tensor.shape.extend(draw(right | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)))
        if draw(st.booleans()):
            tensor.contents.uint_contents.extend(draw(st.lists(st.integers(0, 2**32 - 1), max_size=20)))
            tensor.contents.fp32_contents.extend(draw(st.lists(st.floats(width=32), max_size=20)))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
        request.raw_input_contents.append(draw(st.binary(min_size=16, max_size=16) | st.binary(max_size=60)))
    for _ in range(draw(st.integers(0, 2))):
        request.outputs.add(name=draw(st.sampled_from(["scores", "exit", "node", "nonsense"])))
    return request


@EXAMPLES
@given(request=requests())
def test_requests_that_are_nearly_right(channel, request):
    assert check(channel, request.SerializeToString()) in FINE | {grpc.StatusCode.OK}


@EXAMPLES
@given(data=st.binary(max_size=300))
def test_bytes_that_are_no_message(channel, data):
    code = check(channel, data)
    try:
        ModelInferRequest.FromString(data)
    except DecodeError:
        assert code == grpc.StatusCode.INVALID_ARGUMENT
    else:
        assert code in FINE


@EXAMPLES
@given(data=st.binary(max_size=60), method=st.sampled_from(["ModelConfig", "ModelStatistics", "ModelReady"]))
def test_other_calls(channel, data, method):
    assert check(channel, data, method) in FINE | {grpc.StatusCode.OK}


@EXAMPLES
@given(
    path=st.lists(
        st.sampled_from(["v2", "models", "small", "infer", "versions", "%ff", "..", "a b".replace(" ", "%20")])
    ).map(lambda parts: "/" + "/".join(parts)),
    body=st.binary(max_size=100),
    header=st.sampled_from([{}, {"Inference-Header-Content-Length": "3"}, {"Content-Encoding": "gzip"}]),
)
def test_paths_and_bodies(tree, path, body, header):
    status, _, _ = http(tree.places["edge-0"].http, "POST", path, body, header)
    assert status < 500


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_rest_description_holds_under_schemathesis(tree, mode):
    """What fits the description is answered as described; what does not is refused with a 4xx."""
    place = tree.places["device-0"].http
    schema = schemathesis.openapi.from_url(f"http://{place}/openapi.json")
    tried = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check_case(case):
            tried[case.operation.path] += 1
            response = case.call(base_url=f"http://{place}")
            if response.status_code != 504:  # what a timeout of microseconds asks for
                case.validate_response(response)

        check_case()
    assert tried["/v2/models/small/infer"] >= 60
    assert len(tried) >= (10 if mode is GenerationMode.POSITIVE else 1)


def test_the_node_still_answers_after_all_that(tree, bundle):
    from tests.serving.asking import message
    from tests.serving.ports.test_malformed import call

    for node in ("edge-0", "device-0"):
        assert asyncio.run(call(tree.places[node].grpc, message(bundle)))
        assert tree.processes[node].poll() is None
