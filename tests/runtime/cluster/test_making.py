"""What replicas are told of their engine."""

from pathlib import Path

import pytest

from rlctl.config import Layer
from rlctl.errors import UsageError
from rlctl.ops.resolve import resolve
from rlctl.runtime.cluster.making import replica_setup


def setup(engine: str, name: str):
    layer = Layer("small", {"placement.layout": "separate", "cluster.devices_per_node": 2, "sync.backend": "ipc"})
    config = resolve(env={}, layers=[layer], overrides=[]).config
    config.rollout.engine = engine
    return replica_setup(config, "model", name, logs=Path("/logs"))


def test_each_sglang_replica_has_a_server_of_its_own(monkeypatch):
    monkeypatch.setenv("RLCTL_SGLANG_KEY", "secret")
    assert setup("transformers", "0").options == {}
    assert setup("sglang", "hybrid-1").options == {"log": "/logs/server_hybrid-1.log"}
    servers = "sglang:http://one:30000,http://two:30000"
    assert setup(servers, "1").options == {"url": "http://two:30000", "key": "secret"}
    with pytest.raises(UsageError, match="2 servers for more replicas"):
        setup(servers, "2")
