"""Inputs of Theorem 1 to test with."""

import numpy as np
from hypothesis import strategies as st

from exitflow.theory.bound import BoundInputs
from tests.oracles import theory


def paper_inputs(**changes):
    """The paper's tree of 7 with equal partition; figures of a size that a real network has."""
    probabilities = np.array([[1.0, 0, 0]] * 4 + [[0.2, 0.8, 0]] * 2 + [[0.2, 0.2, 0.6]])
    fields = {
        "serve_share": np.array([0.8, 0.15, 0.05]),
        "samples": np.array([3750.0] * 4 + [7500.0] * 2 + [15000.0]),
        "probabilities": probabilities,
        "pseudo_dimension": np.array([5e3, 5e4, 7e5]),
        "gradient_variance": np.array([[0.2, 0.5, 3.0]] * 7),
        "gradient_bound": np.array([[0.5, 0.8, 5.0]] * 7),
        "loss_bound": 2.3,
        "smoothness": 0.25,
        "strong_convexity": 0.02,
        "heterogeneity": 2.3,
        "squared_distance": 230.0,
        "num_rounds": 100,
        "num_steps": 12,
    }
    return BoundInputs(**(fields | changes))


positive = st.floats(1e-3, 1e3)


@st.composite
def bound_inputs(draw):
    """Any valid inputs; some pairs never train, but every exit has a node."""
    num_nodes, num_exits = draw(st.integers(1, 5)), draw(st.integers(1, 4))

    def matrix(values):
        return np.array([[draw(values) for _ in range(num_exits)] for _ in range(num_nodes)])

    probabilities = matrix(st.sampled_from([0.0, 0.0, 0.2, 0.7, 1.0]))
    for exit in range(num_exits):
        if not probabilities[:, exit].any():
            probabilities[draw(st.integers(0, num_nodes - 1)), exit] = 0.5
    share = np.array([draw(st.floats(0.01, 1)) for _ in range(num_exits)])
    return BoundInputs(
        serve_share=share / share.sum(),
        samples=np.array([float(draw(st.integers(1, 1000))) for _ in range(num_nodes)]),
        probabilities=probabilities,
        pseudo_dimension=np.array([draw(positive) for _ in range(num_exits)]),
        gradient_variance=matrix(positive),
        gradient_bound=matrix(positive),
        loss_bound=draw(positive),
        smoothness=draw(positive),
        strong_convexity=draw(positive),
        heterogeneity=draw(positive),
        squared_distance=draw(positive),
        num_rounds=draw(st.integers(1, 100)),
        num_steps=draw(st.integers(1, 20)),
        server_learning_rate=draw(st.floats(0.1, 2)),
        uniform_constant=draw(positive),
    )


@st.composite
def inputs_and_weights(draw):
    inputs = draw(bound_inputs())
    weights = np.array([draw(st.floats(0, 1)) for _ in inputs.serve_share]) + 1e-3
    return inputs, weights / weights.sum()


def literal(inputs):
    """The same for the oracle."""
    return theory.Given(
        Lambda=inputs.serve_share.tolist(),
        S=inputs.samples.tolist(),
        p=inputs.probabilities.tolist(),
        Pdim=inputs.pseudo_dimension.tolist(),
        sigma2=inputs.gradient_variance.tolist(),
        G=inputs.gradient_bound.tolist(),
        M=inputs.loss_bound,
        L=inputs.smoothness,
        mu=inputs.strong_convexity,
        Gamma=inputs.heterogeneity,
        distance2=inputs.squared_distance,
        T=inputs.num_rounds,
        J=inputs.num_steps,
        eta_s=inputs.server_learning_rate,
        C=inputs.uniform_constant,
    )
