"""Certificates are renewed under nodes that serve."""

import asyncio
import json
import re
import signal
import ssl
import time

import grpc
import pytest
from click.testing import CliRunner

from exitflow.certificates import read_identity
from exitflow.cli.main import main
from exitflow.errors import ConfigError, ServingError
from exitflow.serving.node.node import Node
from exitflow.serving.node.status import problems
from exitflow.serving.ports.description import Surroundings
from exitflow.serving.ports.metrics import prometheus_text
from exitflow.serving.traffic.cluster import LocalCluster
from exitflow.serving.wire.messages import SERVICE
from exitflow.serving.wire.node_certificates import make_certificates, renew_certificates
from exitflow.serving.wire.own_certificate import OwnCertificate
from exitflow.serving.wire.security import Security
from tests.serving.asking import message
from tests.serving.inprocess import EAGER, PATIENT, ask, http, running

pytestmark = pytest.mark.heavy

NODES = ["device", "edge", "cloud"]


@pytest.fixture
def certs(tmp_path):
    make_certificates(tmp_path / "certs", NODES, {"edge": ["edge.example"]}, days=30)
    return tmp_path / "certs"


def serial(folder):
    return read_identity(folder / "node.pem", folder / "node-key.pem").certificate.serial_number


async def shown_at(place, certs):
    """The serial number of the certificate that a new caller sees."""
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    context.load_cert_chain(certs / "client" / "node.pem", certs / "client" / "node-key.pem")
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection(*place.split(":"), ssl=context, server_hostname="localhost")
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return int(found, 16)


def test_new_callers_see_the_renewed_certificate_and_old_ones_are_served_on(eager, certs):
    async def scenario():
        own = OwnCertificate(Security(str(certs / "cloud")), "cloud")
        port = {"credentials": own.server_credentials(mutual=True), "certified": True}
        trusted = Security(str(certs / "client")).channel_credentials()
        async with running(eager, "cloud", port=port) as (_, place), grpc.aio.secure_channel(place, trusted) as channel:
            infer, data = channel.unary_unary(f"/{SERVICE}/ModelInfer"), message(eager).SerializeToString()
            await infer(data, timeout=PATIENT)
            before = serial(certs / "cloud")
            assert await shown_at(place, certs) == before
            assert not own.renewed()
            renew_certificates(certs, NODES, {}, days=30)
            assert own.renewed()
            assert await shown_at(place, certs) == serial(certs / "cloud") != before
            await infer(data, timeout=PATIENT)

    asyncio.run(scenario())


def test_a_link_connects_anew_and_loses_nothing_that_is_under_way(eager, certs):
    async def scenario():
        own = OwnCertificate(Security(str(certs / "edge")), "edge")
        port = {"credentials": own.server_credentials(mutual=True), "certified": True}
        async with running(eager, "edge", port=port) as (_, place):
            node = Node(eager, "device", EAGER, {"edge": place}, security=Security(str(certs / "device")))
            node.start()
            assert (await ask(node, eager)).nodes == ["edge"]
            under_way = [asyncio.create_task(ask(node, eager)) for _ in range(20)]
            await asyncio.sleep(0)
            node.connect_anew()
            under_way += [asyncio.create_task(ask(node, eager)) for _ in range(20)]
            assert {name for answers in await asyncio.gather(*under_way) for name in answers.nodes} == {"edge"}
            await node.close()

    asyncio.run(scenario())


def test_a_renewed_certificate_keeps_its_names_and_its_ca(certs):
    before, ca = serial(certs / "edge"), (certs / "ca.pem").read_bytes()
    renew_certificates(certs, [*NODES, "new"], {"cloud": ["10.0.0.1"]}, days=20)
    names = {}
    for name in ("edge", "cloud", "new"):
        text = read_identity(certs / name / "node.pem", certs / name / "node-key.pem").certificate
        names[name] = str(text.extensions)
    assert "edge.example" in names["edge"]
    assert "10.0.0.1" in names["cloud"]
    assert serial(certs / "edge") != before
    assert (certs / "ca.pem").read_bytes() == ca == (certs / "new" / "ca.pem").read_bytes()


def test_certificates_cannot_outlive_their_ca(tmp_path):
    make_certificates(tmp_path / "certs", NODES, {}, days=5, authority_days=5)
    with pytest.raises(ServingError, match="its CA ends in 4 days, before certificates of 30 days would"):
        renew_certificates(tmp_path / "certs", NODES, {}, days=30)


def test_without_the_key_of_the_ca_nothing_is_renewed(certs):
    (certs / "ca-key.pem").unlink()
    with pytest.raises(ConfigError, match=r"ca-key.pem and ca.pem cannot be used: .*No such file"):
        renew_certificates(certs, NODES, {}, days=30)


def test_files_that_do_not_fit_together_are_not_taken_and_the_old_ones_shown_on(certs, tmp_path):
    own = OwnCertificate(Security(str(certs / "cloud")), "cloud")
    before = own.shown
    make_certificates(tmp_path / "other", NODES, {}, days=30)
    good = {path: path.read_bytes() for path in (certs / "cloud").iterdir()}
    for name in ("node.pem", "node-key.pem", "ca.pem"):
        (certs / "cloud" / name).write_bytes((tmp_path / "other" / "cloud" / name).read_bytes())
        assert (own.renewed(), own.shown) == (name == "ca.pem", own.shown)
        if name != "ca.pem":
            assert own.shown == before
    for path, data in good.items():  # back again, by way of another node's
        path.write_bytes(data)
    assert own.renewed()
    for name in ("node.pem", "node-key.pem"):
        (certs / "cloud" / name).write_bytes((certs / "edge" / name).read_bytes())
    assert not own.renewed()


def test_operators_are_told_how_long_a_certificate_lasts(eager, certs):
    async def scenario():
        own = OwnCertificate(Security(str(certs / "cloud")), "cloud")
        async with running(eager, "cloud") as (node, _):
            text = prometheus_text(node, Surroundings(certificate=own)).decode()
            for which, end in (("node", own.shown.expires), ("authority", own.shown.authority_expires)):
                name = "exitflow_certificate_expiry_timestamp_seconds"
                value = re.search(rf'^{name}\{{certificate="{which}",node="cloud"\}} (\S+)$', text, re.MULTILINE)[1]
                assert float(value) == end > time.time() + 29 * 86_400
            assert problems(node, own) == []
            renew_certificates(certs, NODES, {}, days=3)
            assert own.renewed()
            assert problems(node, own) == ["the certificate ends in 3 days: renew it with exitflow certs --renew"]

    asyncio.run(scenario())


def test_a_tree_that_serves_takes_renewed_certificates_up(eager, certs, tmp_path):
    options = ["--token=sesame", "--set=forward=feature", "--set=forward_timeout=30"]
    cluster = LocalCluster(eager, logs=tmp_path, options=options)
    try:
        for name in cluster.places:
            cluster.start([name], options=[f"--certs={certs / name}"])
        result = CliRunner().invoke(main, ["certs", str(eager.path), "--out", str(certs), "--renew"])
        assert result.exit_code == 0, result.output
        for process in cluster.processes.values():
            process.send_signal(signal.SIGHUP)

        async def scenario():
            for name, place in cluster.places.items():
                for address in (place.grpc, place.http):
                    for _ in range(1000):
                        if await shown_at(address, certs) == serial(certs / name):
                            break
                        await asyncio.sleep(0.02)
                    else:
                        raise AssertionError(f"{name} does not show its renewed certificate")
            trusted = Security(str(certs / "client")).channel_credentials()
            async with grpc.aio.secure_channel(cluster.places["device"].grpc, trusted) as channel:
                raw = await channel.unary_unary(f"/{SERVICE}/ModelInfer")(message(eager).SerializeToString())
                assert b"cloud" in raw

        asyncio.run(scenario())
        context = ssl.create_default_context(cafile=certs / "ca.pem")
        ready = http(cluster.places["device"].http, "GET", "/readyz", context=context)
        assert json.loads(ready[2])["problems"] == []
    finally:
        cluster.stop()
