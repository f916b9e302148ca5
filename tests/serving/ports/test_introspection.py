"""What Kubernetes, grpcurl and Prometheus ask."""

import asyncio
import re
import shutil
import subprocess

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from exitflow.errors import BundleError
from exitflow.serving.ports.description import Surroundings
from exitflow.serving.ports.http_server import start_rest
from exitflow.serving.wire.messages import METHODS, SERVICE
from tests.serving.asking import message
from tests.serving.inprocess import EAGER, PATIENT, FakeParent, ask, fake_parent, http, running
from tests.serving.small import NUM_CLASSES, chain, make_bundle

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_is_told_without_a_token(eager, service):
    async def scenario():
        async with (
            running(eager, "cloud", token="sesame") as (node, place),
            grpc.aio.insecure_channel(place) as channel,
        ):
            check = health_pb2_grpc.HealthStub(channel).Check
            asked = health_pb2.HealthCheckRequest(service=service)
            assert (await check(asked, timeout=PATIENT)).status == health_pb2.HealthCheckResponse.SERVING
            node.draining = True
            assert (await check(asked, timeout=PATIENT)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENT)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def declarations(place):
    """(services, methods of ours) as grpcurl finds them."""
    with grpc.insecure_channel(place) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = DescriptorPool(database).FindServiceByName(SERVICE)
        return set(database.get_services()), {method.name: method.input_type.full_name for method in service.methods}


def test_reflection_declares_what_is_served(eager):
    async def scenario():
        async with running(eager, "cloud") as (_, place):
            services, methods = await asyncio.to_thread(declarations, place)
            assert services == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
            assert methods == {name: f"inference.{name}Request" for name in METHODS}

    asyncio.run(scenario())


def test_reflection_wants_the_token(eager):
    async def scenario():
        async with running(eager, "cloud", token="sesame") as (_, place):
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(declarations, place)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scenario())


def series(text):
    """{name{labels}: value}"""
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_metrics_say_what_operators_ask_for(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain(limits=(20.0, 5.0)))

    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with (
            fake_parent(parent) as address,
            running(bundle, "device", {"edge": address}, spec=EAGER) as (node, place),
        ):
            server = await start_rest(node, "127.0.0.1:0", around=Surroundings({"grpc": int(place.rpartition(":")[2])}))
            web = f"127.0.0.1:{server.port}"

            async def metrics():
                return (await asyncio.to_thread(http, web, "GET", "/metrics"))[2]

            async with grpc.aio.insecure_channel(place) as channel:
                await channel.unary_unary(f"/{SERVICE}/ModelInfer")(message(bundle).SerializeToString())
                wrong = message(bundle, model_version="other").SerializeToString()
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(f"/{SERVICE}/ModelInfer")(wrong)
                node.control.threshold = node.control._hard = float("inf")
                node.control._buckets["edge"]._tokens = 5.0
                await ask(node, bundle)
                node.links["edge"].state.times_cut = 3
                text = await metrics()
            found = series(text)
            assert all('node="device"' in name for name in found)
            assert float(found['process_resident_memory_bytes{node="device"}']) > 1e6
            assert found['exitflow_requests_total{exit="1",node="device",status="ok"}'] == "1.0"
            assert found['exitflow_requests_total{exit="2",node="device",status="ok"}'] == "1.0"
            assert found['exitflow_requests_total{exit="",node="device",status="not-found"}'] == "1.0"
            assert found['exitflow_link_seconds_count{node="device",parent="edge"}'] == "1.0"
            assert found['exitflow_link_cuts_total{node="device",parent="edge"}'] == "3.0"
            assert found['exitflow_link_limit{node="device",parent="edge"}'] == "20.0"
            assert found['exitflow_link_burst{node="device",parent="edge"}'] == "19.0"  # 20 without what may bunch
            assert found['exitflow_connections{node="device",port="grpc"}'] == "1.0"
            assert found['exitflow_connections{node="device",port="http"}'] == "1.0"
            loaded = float(found['exitflow_last_reload_success_timestamp_seconds{node="device"}'])
            assert loaded == pytest.approx(node.loaded_at)
            (tmp_path / "b" / "manifest.json").write_text("{}")
            with pytest.raises(BundleError):
                await node.reload()
            assert series(await metrics())['exitflow_last_reload_successful{node="device"}'] == "0.0"
            await server.close()
            return text

    text = asyncio.run(scenario())
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert not re.search("error", done.stdout + done.stderr), done
