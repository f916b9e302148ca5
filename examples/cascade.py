"""Three classifiers of scikit-learn as one tree: the smallest at the devices, the largest in the cloud.

    python examples/cascade.py cascade
    exitflow cascade cascade/small.onnx cascade/medium.onnx cascade/large.onnx \\
        --plan cascade/system.toml --calibrate cascade/held_out.npz --out bundles/cascade
    exitflow load bundles/cascade --duration 5

scikit-learn has no ONNX of its own, so the networks are written down layer by layer.
"""

import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

HIDDEN = {"small": (4,), "medium": (12,), "large": (128, 64)}
SYSTEM = """name = "cascade"

[[tiers]]
name = "device"
count = 4
exit = 1
arrival_rate = 25.0
max_transfer_rate = 10.0

[[tiers]]
name = "edge"
count = 1
exit = 2
max_transfer_rate = 12.0

[[tiers]]
name = "cloud"
count = 1
exit = 3
"""


def to_onnx(network: MLPClassifier) -> bytes:
    """Images of 8 x 8 numbers from 0 to 16 -> probabilities of the ten digits."""
    constants = {"sixteen": np.array(16, np.float32), "flat": np.array([-1, 64])}
    nodes = [helper.make_node("Reshape", ["x", "flat"], ["row"]), helper.make_node("Div", ["row", "sixteen"], ["h0"])]
    for number, (weights, offsets) in enumerate(zip(network.coefs_, network.intercepts_, strict=True)):
        constants |= {f"w{number}": weights.astype(np.float32), f"b{number}": offsets.astype(np.float32)}
        nodes.append(helper.make_node("Gemm", [f"h{number}", f"w{number}", f"b{number}"], [f"a{number}"]))
        last = number == len(network.coefs_) - 1
        kind, out = ("Softmax", "probabilities") if last else ("Relu", f"h{number + 1}")
        nodes.append(helper.make_node(kind, [f"a{number}"], [out]))
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString()


def main(out: Path) -> None:
    """Train the three, and write them, the system and what was held out."""
    images, labels = load_digits(return_X_y=True)
    train, held_out, train_labels, held_out_labels = train_test_split(images, labels, test_size=0.4, random_state=0)
    out.mkdir(parents=True, exist_ok=True)
    for name, hidden in HIDDEN.items():
        network = MLPClassifier(hidden, max_iter=3000, random_state=0).fit(train / 16, train_labels)
        (out / f"{name}.onnx").write_bytes(to_onnx(network))
        print(f"{name}: {100 * network.score(held_out / 16, held_out_labels):.1f} % alone")
    np.savez(out / "held_out.npz", inputs=held_out.reshape(-1, 8, 8).astype(np.uint8), labels=held_out_labels)
    (out / "system.toml").write_text(SYSTEM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
