import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exitflow.serving.wire.codecs import CODECS, decode, encode

FEATURES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)),
    elements=st.floats(-1000, 1000, width=32),
)
LEVELS = {"u8": 255, "u4": 15}


@given(FEATURES, st.sampled_from(list(CODECS)), st.booleans())
def test_every_codec_comes_back_within_its_precision(features, codec, compress):
    back = decode(encode(features, codec, compress=compress), features.shape, codec, compress=compress)
    assert back.shape == features.shape
    assert back.dtype == np.float32
    if codec == "fp32":
        assert (back == features).all()
    elif codec == "fp16":
        assert np.allclose(back, features, rtol=1e-3, atol=1e-6)
    else:
        flat = features.reshape(len(features), -1)
        step = (flat.max(axis=1) - flat.min(axis=1)) / LEVELS[codec]
        error = np.abs(back - features).reshape(len(features), -1).max(axis=1)
        assert (error <= step / 2 + 1e-3).all()


def test_sizes_of_one_sample_of_100_values():
    features = np.zeros((1, 100), dtype=np.float32)
    assert {codec: len(encode(features, codec)) for codec in CODECS} == {"fp32": 400, "fp16": 200, "u8": 108, "u4": 58}


@pytest.mark.parametrize("codec", ["u8", "u4"])
def test_what_a_sample_becomes_does_not_depend_on_its_batch(codec):
    features = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32) * [[1], [10], [100]]
    together = decode(encode(features, codec), (3, 7), codec)
    for row in range(3):
        assert (decode(encode(features[row : row + 1], codec), (1, 7), codec)[0] == together[row]).all()


@given(st.binary(max_size=200), st.sampled_from([*CODECS, "zip"]), st.booleans())
def test_nonsense_is_a_value_error_or_features_of_that_shape(data, codec, compress):
    try:
        found = decode(data, (2, 5), codec, compress=compress)
    except ValueError:
        return
    assert found.shape == (2, 5)


def test_a_small_message_cannot_fill_the_memory():
    import zlib

    bomb = zlib.compress(bytes(50_000_000))
    with pytest.raises(ValueError, match="take 40 bytes, got 41"):
        decode(bomb, (1, 10), "fp32", compress=True)
