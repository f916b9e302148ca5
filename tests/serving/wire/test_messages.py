"""Our declarations are those of the protocol: every field as in Triton's client, in pools that do not clash."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from exitflow.serving.wire.messages import MESSAGES, METHODS

INNER = {
    "TensorMetadata": service_pb2.ModelMetadataResponse.TensorMetadata,
    "InferInputTensor": service_pb2.ModelInferRequest.InferInputTensor,
    "InferRequestedOutputTensor": service_pb2.ModelInferRequest.InferRequestedOutputTensor,
    "InferOutputTensor": service_pb2.ModelInferResponse.InferOutputTensor,
    "ModelIndex": service_pb2.RepositoryIndexResponse.ModelIndex,
}
ENUM_AS_NUMBER = {FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32}  # the same bytes


def theirs(name):
    if name in INNER:
        return INNER[name].DESCRIPTOR
    return (
        getattr(service_pb2, name, None).DESCRIPTOR
        if hasattr(service_pb2, name)
        else getattr(model_config_pb2, name).DESCRIPTOR
    )


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_is_the_protocols(name):
    known = {field.name: field for field in theirs(name).fields}
    for field in MESSAGES[name].DESCRIPTOR.fields:
        other = known[field.name]
        assert (field.number, field.type, field.is_repeated) == (
            other.number,
            ENUM_AS_NUMBER.get(other.type, other.type),
            other.is_repeated,
        )


def test_every_method_is_the_protocols():
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert set(METHODS) <= {method.name for method in service.methods}


def test_bytes_written_by_one_are_read_by_the_other():
    request = service_pb2.ModelInferRequest(model_name="m", id="7")
    request.parameters["timeout"].int64_param = 5
    request.inputs.add(name="input", datatype="UINT8", shape=[1, 2])
    request.raw_input_contents.append(b"ab")
    ours = MESSAGES["ModelInferRequest"].FromString(request.SerializeToString())
    assert (ours.model_name, ours.id, ours.parameters["timeout"].int64_param) == ("m", "7", 5)
    assert (list(ours.inputs[0].shape), list(ours.raw_input_contents)) == ([1, 2], [b"ab"])
    assert service_pb2.ModelInferRequest.FromString(ours.SerializeToString()) == request
