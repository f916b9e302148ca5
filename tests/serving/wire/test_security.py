"""Who may listen where, and who may ask."""

import asyncio
import shutil
import ssl
import stat
import subprocess
import sys
import time

import grpc
import pytest
from click.testing import CliRunner

from exitflow.cli.main import main
from exitflow.errors import ConfigError, ServingError
from exitflow.serving.node.node import Node
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.ports.grpc_server import OWN_SERVICE
from exitflow.serving.ports.server import ServeOptions
from exitflow.serving.traffic.cluster import LocalCluster
from exitflow.serving.wire.messages import MESSAGES, SERVICE
from exitflow.serving.wire.node_certificates import make_certificates
from exitflow.serving.wire.own_certificate import OwnCertificate
from exitflow.serving.wire.security import Security
from tests.serving.asking import message
from tests.serving.inprocess import http, running


def call(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def certs(eager, tmp_path_factory):
    out = tmp_path_factory.mktemp("certs") / "certs"
    result = call("certs", eager.path, "--out", out)
    assert result.exit_code == 0, result.output
    return out


async def infer(channel, bundle, **options):
    return await channel.unary_unary(f"/{SERVICE}/ModelInfer")(
        message(bundle).SerializeToString(), timeout=5, **options
    )


@pytest.mark.parametrize("option", ["--listen", "--http", "--clients"])
def test_listening_beyond_this_machine_needs_tls_or_knowing_better(eager, option):
    result = call("serve", eager.path, "--node", "cloud", option, "0.0.0.0:0")
    assert result.exit_code == 2
    assert f"{option}: 0.0.0.0 can be reached from other machines: give --certs DIR" in result.stderr


@pytest.mark.parametrize("option", ["--http", "--clients"])
def test_clients_beyond_this_machine_show_a_token_unless_everybody_may_ask(eager, certs, option):
    args = ("serve", eager.path, "--node", "cloud", "--listen", "127.0.0.1:0", "--certs", certs / "cloud")
    result = call(*args, option, "0.0.0.0:0")
    assert result.exit_code == 2
    assert f"{option}: whoever reaches 0.0.0.0 could ask this node: give --token TOKEN, or --open" in result.stderr
    key = option.removeprefix("--")
    for more in (Security(str(certs / "cloud"), open=True), Security(str(certs / "cloud"), "sesame")):
        ServeOptions(str(eager.path), "cloud", "0.0.0.0:0", **{key: "0.0.0.0:0"}, security=more)


def test_a_node_starts_with_its_own_certificate_only(eager, certs):
    result = call("serve", eager.path, "--node", "cloud", "--listen", "127.0.0.1:0", "--certs", certs / "edge")
    assert result.exit_code == 2
    assert "is the certificate of 'edge', not that of node 'cloud'" in result.stderr


def test_a_certificate_that_others_would_not_believe_is_one_sentence(eager, certs, tmp_path):
    make_certificates(tmp_path / "other", ["cloud"], {}, days=1)
    shutil.copy(certs / "ca.pem", tmp_path / "other" / "cloud" / "ca.pem")
    make_certificates(tmp_path / "old", ["cloud"], {}, days=-1)
    for folder, why in (("other", "unable to get local issuer certificate"), ("old", "certificate has expired")):
        with pytest.raises(ConfigError, match=f"node.pem under ca.pem cannot be used: {why}"):
            Security(str(tmp_path / folder / "cloud"))


def test_what_a_certificate_says_is_read(certs):
    shown = Security(str(certs / "cloud")).shown
    assert shown.name == "cloud"
    assert shown.expires > time.time()
    assert shown.authority_expires > time.time()


def certified(folder):
    """The port for nodes of one that has this certificate."""
    own = OwnCertificate(Security(str(folder)), folder.name)
    return {"credentials": own.server_credentials(mutual=True), "certified": True}


async def code_of(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def questions(channel, bundle):
    """What may be asked of a node: name -> call."""
    load = MESSAGES["RepositoryModelLoadRequest"](model_name=bundle.manifest.name).SerializeToString()
    forward = {}
    for child in ("device", "edge"):
        request = message(bundle)
        request.parameters["exitflow_from"].string_param = child
        forward[f"forward as {child}"] = ask(channel, f"/{SERVICE}/ModelInfer", request.SerializeToString())
    return forward | {
        "infer": infer(channel, bundle),
        "reload": ask(channel, f"/{SERVICE}/RepositoryModelLoad", load),
        "samples": ask(channel, f"/{OWN_SERVICE}/Samples", b""),
        "system": ask(channel, f"/{OWN_SERVICE}/System", b""),
        "status": ask(channel, f"/{OWN_SERVICE}/Status", b""),
        "live": ask(channel, f"/{SERVICE}/ServerLive", b""),
    }


def ask(channel, method, data):
    return channel.unary_unary(method)(data, timeout=30)


ALWAYS = {"status", "live"}
OPERATORS = {"reload", "samples", "system"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("caller", "may"),
    [
        ("client", ALWAYS | OPERATORS | {"infer"}),
        ("edge", ALWAYS | {"forward as edge"}),
        ("device", ALWAYS),  # no child of the cloud
    ],
)
def test_a_certificate_says_what_its_owner_may_ask(eager, certs, caller, may):
    async def scenario():
        port = certified(certs / "cloud")
        trusted = Security(str(certs / caller)).channel_credentials()
        async with running(eager, "cloud", port=port) as (_, place), grpc.aio.secure_channel(place, trusted) as channel:
            codes = {what: await code_of(call) for what, call in questions(channel, eager).items()}
            assert codes == {what: "OK" if what in may else "PERMISSION_DENIED" for what in codes}

    asyncio.run(scenario())


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("for_nodes", "may"),
    [(True, ALWAYS | OPERATORS | {"infer", "forward as edge"}), (False, ALWAYS | {"infer"})],
)
def test_without_certificates_the_port_says_what_may_be_asked(eager, for_nodes, may):
    async def scenario():
        port = {"for_nodes": for_nodes}
        async with running(eager, "cloud", port=port) as (_, place), grpc.aio.insecure_channel(place) as channel:
            codes = {what: await code_of(call) for what, call in questions(channel, eager).items()}
            assert {what for what, code in codes.items() if code == "OK"} == may

    asyncio.run(scenario())


@pytest.mark.heavy
def test_a_parent_with_the_certificate_of_another_node_is_not_believed(eager, certs):
    async def scenario():
        port = certified(certs / "cloud")
        security = Security(str(certs / "device"))
        async with running(eager, "edge", port=port) as (_, place):
            node = Node(eager, "device", ServingSpec(audit_share=0.0), {"edge": place}, security=security)
            node.start()
            assert (await node.infer(node.current, eager.samples().inputs[:1])).nodes == ["device"]
            assert node.counts.fallbacks == {"unreachable": 1}
            await node.close()

    asyncio.run(scenario())


def test_certificates_are_private_and_never_overwritten(eager, certs):
    for path in certs.rglob("*-key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {path.name for path in certs.iterdir() if path.is_dir()} == {"device", "edge", "cloud", "client"}
    result = call("certs", eager.path, "--out", certs)
    assert result.exit_code == 2
    assert "is already there" in result.stderr
    result = call("certs", eager.path, "--out", certs / "x", "--host", "clod=1.2.3.4")
    assert result.exit_code == 2
    assert "did you mean 'cloud'?" in result.stderr


@pytest.mark.heavy
def test_making_certificates_needs_nothing_that_serves(eager, tmp_path):
    absent = "import sys; sys.modules.update(dict.fromkeys(['grpc', 'onnxruntime', 'uvicorn', 'google.protobuf'])); "
    program = f"{absent}from exitflow.cli.main import main; main(['certs', *sys.argv[1:]])"
    arguments = [sys.executable, "-c", program, str(eager.path), "--out", str(tmp_path / "certs")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "certs" / "cloud" / "node.pem").exists()


@pytest.mark.parametrize("name", ["client", "x" * 65])
def test_a_name_that_no_certificate_can_have_is_one_sentence_and_leaves_nothing(tmp_path, name):
    with pytest.raises(ServingError, match="the name in a certificate has at most 64 characters and is not 'client'"):
        make_certificates(tmp_path / "certs", ["edge", name], {}, days=1)
    assert not (tmp_path / "certs").exists()


def test_a_node_may_have_a_name_that_no_host_can_have(tmp_path):
    make_certificates(tmp_path / "certs", ["büro", "a_b"], {}, days=1)
    assert (tmp_path / "certs" / "büro" / "node.pem").exists()


@pytest.mark.parametrize("token", ["", "abc\n", "schlüssel", "abc ", " abc"])
def test_a_token_that_fits_into_no_header_is_refused_at_the_start(eager, token):
    result = call("serve", eager.path, "--node", "cloud", "--token", token)
    assert (result.exit_code, "--token: must" in result.stderr) == (2, True)


@pytest.mark.heavy
def test_nodes_need_certificates_of_their_own_and_clients_a_token(eager, certs, tmp_path):
    cluster = LocalCluster(
        eager, logs=tmp_path, options=["--token=sesame", "--set=forward=feature", "--set=forward_timeout=30"]
    )
    for name in ("cloud", "edge", "device"):  # parents first, or children find out that they are not there
        cluster.start([name], options=[f"--certs={certs / name}"])
    place = cluster.places["device"]
    ca = (certs / "ca.pem").read_bytes()

    async def scenario():
        trusted = Security(str(certs / "client")).channel_credentials()
        async with grpc.aio.secure_channel(place.grpc, trusted) as channel:
            raw = await infer(channel, eager)
            assert b"cloud" in raw  # it went all the way up, over mutual TLS
            pretended = message(eager)
            pretended.parameters["exitflow_from"].string_param = "device"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/ModelInfer")(pretended.SerializeToString(), timeout=5)
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        async with grpc.aio.secure_channel(place.grpc, grpc.ssl_channel_credentials(ca)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(channel, eager)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(place.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(channel, eager)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    try:
        asyncio.run(scenario())
        context = ssl.create_default_context(cadata=ca.decode())
        assert http(place.http, "GET", "/healthz", context=context)[0] == 200
        assert http(place.http, "GET", "/status", context=context)[0] == 401
        token = {"Authorization": "Bearer sesame"}
        assert http(place.http, "GET", "/status", headers=token, context=context)[0] == 200
        result = call("load", place.grpc, "--certs", certs / "client", "--duration", 1, "--json")
        assert result.exit_code == 0, result.output
    finally:
        cluster.stop()


@pytest.mark.heavy
def test_a_token_is_asked_of_clients_without_tls_too(eager):
    async def scenario():
        async with running(eager, "cloud", token="sesame") as (_, place), grpc.aio.insecure_channel(place) as channel:
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "sesame"),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await infer(channel, eager, metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert await infer(channel, eager, metadata=(("authorization", "Bearer sesame"),))

    asyncio.run(scenario())


@pytest.mark.heavy
def test_nodes_without_certificates_show_each_other_the_token(eager):
    async def scenario():
        spec = ServingSpec(forward="feature", forward_timeout=30, audit_share=0.0)
        async with (
            running(eager, "edge", token="sesame") as (_, place),
            running(eager, "device", {"edge": place}, spec=spec, token="sesame") as (device, _),
        ):
            answers = await device.infer(device.current, eager.samples().inputs[:2])
            assert answers.nodes == ["edge"] * 2

    asyncio.run(scenario())


def test_a_directory_without_certificates_is_one_sentence(eager, tmp_path):
    result = call("serve", eager.path, "--node", "cloud", "--listen", "127.0.0.1:0", "--certs", tmp_path)
    assert result.exit_code == 2
    assert "ca.pem: cannot be read: No such file or directory" in result.stderr


@pytest.mark.parametrize(
    ("file", "what"),
    [("ca.pem", "ca.pem"), ("node.pem", "node.pem with"), ("node-key.pem", "node.pem with node-key.pem")],
)
def test_certificates_that_are_none_are_one_sentence(eager, certs, tmp_path, file, what):
    shutil.copytree(certs / "cloud", tmp_path / "certs")
    (tmp_path / "certs" / file).write_text("-----BEGIN NONSENSE-----")
    result = call("serve", eager.path, "--node", "cloud", "--listen", "127.0.0.1:0", "--certs", tmp_path / "certs")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"exitflow: --certs: {tmp_path / 'certs'}: {what}")
    assert result.stderr.count("\n") == 1
