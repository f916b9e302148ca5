"""The messages of the Open Inference Protocol v2 with Triton's model configuration and statistics.

They are declared here as text and live in a descriptor pool of their own, so that they never clash with the stubs of
another library in the same process ("duplicate symbol 'inference.ServerLiveRequest'"), and no generated code has to
fit one version of protobuf. A test compares every field with those of Triton's client.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
_FILE = "exitflow_inference.proto"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
)

# message: name=number:type; * repeated, {} a map from strings, | one of the alternatives named `choice`
_DECLARATIONS = """
ServerLiveRequest
ServerLiveResponse             live=1:bool
ServerReadyRequest
ServerReadyResponse            ready=1:bool
ModelReadyRequest              name=1:string version=2:string
ModelReadyResponse             ready=1:bool
ServerMetadataRequest
ServerMetadataResponse         name=1:string version=2:string extensions=3:string*
ModelMetadataRequest           name=1:string version=2:string
TensorMetadata                 name=1:string datatype=2:string shape=3:int64*
ModelMetadataResponse          name=1:string versions=2:string* platform=3:string inputs=4:TensorMetadata* outputs=5:TensorMetadata*
InferParameter                 bool_param=1:bool| int64_param=2:int64| string_param=3:string| double_param=4:double| uint64_param=5:uint64|
InferTensorContents            bool_contents=1:bool* int_contents=2:int32* int64_contents=3:int64* uint_contents=4:uint32* uint64_contents=5:uint64* fp32_contents=6:float* fp64_contents=7:double* bytes_contents=8:bytes*
InferInputTensor               name=1:string datatype=2:string shape=3:int64* parameters=4:InferParameter{} contents=5:InferTensorContents
InferRequestedOutputTensor     name=1:string parameters=2:InferParameter{}
ModelInferRequest              model_name=1:string model_version=2:string id=3:string parameters=4:InferParameter{} inputs=5:InferInputTensor* outputs=6:InferRequestedOutputTensor* raw_input_contents=7:bytes*
InferOutputTensor              name=1:string datatype=2:string shape=3:int64* parameters=4:InferParameter{} contents=5:InferTensorContents
ModelInferResponse             model_name=1:string model_version=2:string id=3:string parameters=4:InferParameter{} outputs=5:InferOutputTensor* raw_output_contents=6:bytes*
ModelConfigRequest             name=1:string version=2:string
ModelInput                     name=1:string data_type=2:int32 dims=4:int64*
ModelOutput                    name=1:string data_type=2:int32 dims=3:int64*
ModelDynamicBatching           preferred_batch_size=1:int32* max_queue_delay_microseconds=2:uint64
ModelConfig                    name=1:string platform=2:string max_batch_size=4:int32 input=5:ModelInput* output=6:ModelOutput* dynamic_batching=11:ModelDynamicBatching backend=17:string
ModelConfigResponse            config=1:ModelConfig
ModelStatisticsRequest         name=1:string version=2:string
StatisticDuration              count=1:uint64 ns=2:uint64
InferStatistics                success=1:StatisticDuration fail=2:StatisticDuration queue=3:StatisticDuration compute_input=4:StatisticDuration compute_infer=5:StatisticDuration compute_output=6:StatisticDuration
InferBatchStatistics           batch_size=1:uint64 compute_input=2:StatisticDuration compute_infer=3:StatisticDuration compute_output=4:StatisticDuration
ModelStatistics                name=1:string version=2:string last_inference=3:uint64 inference_count=4:uint64 execution_count=5:uint64 inference_stats=6:InferStatistics batch_stats=7:InferBatchStatistics*
ModelStatisticsResponse        model_stats=1:ModelStatistics*
RepositoryIndexRequest         repository_name=1:string ready=2:bool
ModelIndex                     name=1:string version=2:string state=3:string reason=4:string
RepositoryIndexResponse        models=1:ModelIndex*
RepositoryModelLoadRequest     repository_name=1:string model_name=2:string parameters=3:ModelRepositoryParameter{}
ModelRepositoryParameter       bool_param=1:bool| int64_param=2:int64| string_param=3:string| bytes_param=4:bytes|
RepositoryModelLoadResponse
"""  # noqa: E501

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}


def _declare_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    name, _, rest = text.partition("=")
    number, _, kind = rest.partition(":")
    type_name = kind.rstrip("*{}|")
    if kind.endswith("{}"):
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _declare_field(entry, "key=1:string")
        _declare_field(entry, f"value=2:{type_name}")
        type_name, kind = f"{message.name}.{entry.name}", "*"
    label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(number), label=label)
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{type_name}"
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="choice")
        field.oneof_index = 0


def _declare() -> descriptor_pool.DescriptorPool:
    """A pool with the messages and the service."""
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="proto3")
    for line in _DECLARATIONS.strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for field in fields:
            _declare_field(message, field)
    service = file.service.add(name=SERVICE.removeprefix(f"{PACKAGE}."))
    for name in METHODS:
        kinds = {"input_type": f".{PACKAGE}.{name}Request", "output_type": f".{PACKAGE}.{name}Response"}
        service.method.add(name=name, **kinds)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _message_classes() -> dict[str, Any]:
    found = message_factory.GetMessageClassesForFiles([_FILE], POOL)
    return {name.removeprefix(f"{PACKAGE}."): kind for name, kind in found.items()}


POOL = _declare()
MESSAGES: dict[str, Any] = _message_classes()  # name -> class
ModelInferRequest = MESSAGES["ModelInferRequest"]
ModelInferResponse = MESSAGES["ModelInferResponse"]
