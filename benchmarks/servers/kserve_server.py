"""KServe: python kserve_server.py MODEL.onnx GRPC_PORT HTTP_PORT."""

import sys

import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer


class OnnxModel(Model):  # type: ignore[misc]
    """The documented way: a predict method."""

    def __init__(self, path: str) -> None:
        super().__init__("bench")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.ready = True

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:  # type: ignore[no-untyped-def]
        """One call of the engine."""
        logits = self.session.run(["logits"], {"carry": payload.inputs[0].as_numpy()})[0]
        output = InferOutput("scores", list(logits.shape), "FP32")
        output.set_data_from_numpy(logits, binary_data=True)
        return InferResponse(payload.id or "1", self.name, [output])


if __name__ == "__main__":
    server = ModelServer(grpc_port=int(sys.argv[2]), http_port=int(sys.argv[3]), workers=1)
    server.start([OnnxModel(sys.argv[1])])
