import numpy as np
import pytest

from exitflow.errors import ConfigError
from exitflow.planning.arrivals import Trace, Workload, load_trace
from exitflow.topology.graph import Link, Node, Topology

TOPOLOGY = Topology((Node("a", 1, 30.0, (Link("c"),)), Node("b", 1, 10.0, (Link("c"),)), Node("c", 2)))
EASE = np.linspace(0, 1, 100)


def drawn(device=0, **options):
    workload = Workload(TOPOLOGY, EASE, **{"duration": 200.0, **options})
    return zip(*workload.arrivals(workload.devices[device]), strict=True)


def test_requests_arrive_at_their_rate_independently_of_each_other():
    moments, rows = map(np.array, drawn())
    assert abs(len(moments) - 6000) < 4 * np.sqrt(6000)
    assert (np.diff(moments) >= 0).all()
    gaps = np.diff(moments)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential
    assert np.bincount(rows, minlength=100).min() > 20  # all samples, equally often


def test_the_same_seed_gives_the_same_requests_and_another_others():
    assert list(drawn()) == list(drawn())
    assert list(drawn()) != list(drawn(seed=1))
    assert list(drawn(0)) != list(drawn(1))


def test_a_trace_gives_the_shape_and_the_plan_the_height():
    trace = Trace.of([0, 60, 120, 180], [0, 10, 30, 0])
    moments, _ = map(np.array, drawn(trace=trace))
    counts = np.histogram(moments, bins=4, range=(0, 200))[0]
    assert counts[[0, 3]].tolist() == [0, 0]
    assert counts[2] / counts[1] == pytest.approx(3, rel=0.15)
    assert abs(len(moments) - 6000) < 4 * np.sqrt(6000)


@pytest.mark.parametrize(
    ("drift", "share_of_second_half"), [(None, 0.5), ("difficulty", 0.5), ("traffic", 2 / 3), ("burst", 0.5)]
)
def test_a_drift_changes_the_second_half(drift, share_of_second_half):
    moments, rows = map(np.array, drawn(drift=drift))
    late = moments > 100
    assert late.mean() == pytest.approx(share_of_second_half, abs=0.03)  # traffic: a has both devices' requests
    assert (rows[late].max() < 50) == (drift == "difficulty")
    assert (moments[late] % 1 < 0.5).all() == (drift == "burst")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seconds,requests\n0,1\n60,2\n50,3\n", "time goes back"),
        ("seconds,requests\n0,1\n60,2\n180,3\n240,1\n", "there is a gap between 60 and 180"),
        ("seconds,requests\n0,1\n60,\n120,3\n", "line 3 holds no number"),
        ("seconds,requests\n0,1\n60,nan\n120,3\n", "must be numbers from 0 up"),
        ("seconds,requests\n0,1\n60,-1\n120,3\n", "must be numbers from 0 up"),
        ("seconds,requests\n0,0\n60,0\n", "are 0 in every bin"),
        ("seconds,requests\n0,1\n", "needs 2 to 100,000 bins, got 1"),
        ("time,calls\n0,1\n", "the columns seconds and requests"),
        ("", "the columns seconds and requests"),
        ("\0\1\2", "the columns seconds and requests"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(text, problem, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as refused:
        load_trace(str(path))
    assert refused.value.source == str(path)


def test_a_trace_of_a_gigabyte_or_from_a_device_is_refused(tmp_path):
    path = tmp_path / "trace.csv"
    with path.open("wb") as file:
        file.truncate(2**30)
    for source in (str(path), "/dev/zero", str(tmp_path), str(tmp_path / "missing.csv")):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_trace(source)
