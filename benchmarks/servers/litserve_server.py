"""LitServe: python litserve_server.py MODEL.onnx HTTP_PORT."""

import base64
import sys

import litserve
import numpy as np
import onnxruntime


class OnnxApi(litserve.LitAPI):  # type: ignore[misc]
    """The documented way, with its batching."""

    def setup(self, device: str) -> None:
        """The session."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Bytes in base64, in JSON."""
        return np.frombuffer(base64.b64decode(request["image"]), dtype=np.uint8).reshape(3, 32, 32)

    def predict(self, inputs):  # type: ignore[no-untyped-def]
        """One call of the engine."""
        return self.session.run(["logits"], {"carry": np.ascontiguousarray(inputs)})[0]

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        """As JSON."""
        return {"scores": output.tolist()}


if __name__ == "__main__":
    api = OnnxApi(max_batch_size=16, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="error")
