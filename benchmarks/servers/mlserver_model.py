"""MLServer: the runtime that model-settings.json names."""

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):  # type: ignore[misc]
    """The documented way: load and predict."""

    async def load(self) -> bool:
        """The session."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = self.settings.parameters.uri
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One call of the engine."""
        inputs = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        logits = self.session.run(["logits"], {"carry": inputs})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("scores", logits)])
