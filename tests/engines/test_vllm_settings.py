import pytest

from perturn.config.parsing import build
from perturn.engines import ENGINES
from perturn.engines.vllm.engine import check_vllm
from perturn.engines.vllm.settings import VllmSettings
from perturn.engines.vllm.weight_transfer import check_transfer
from perturn.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "engine.replicas must be >= 1, got 0"),
        ({"context": 1}, "engine.context must be >= 2"),
        ({"cache_gigabytes": 0}, "engine.cache_gigabytes must be > 0"),
        ({"timeout": 0}, "engine.timeout must be > 0"),
        ({"options": {"model": "x", "dtype": "y"}}, "engine.options cannot set dtype, model"),
        ({"servers": ["gpu1:8000"]}, "engine.servers must be like http://host:8000"),
        ({"servers": ["http://gpu1:8000/v1"]}, "without a path"),
        ({"servers": ["http://a", "http://a"]}, "engine.servers must differ"),
        ({"servers": ["http://a"], "replicas": 2}, "engine.replicas is for vLLM in this process"),
        ({"servers": ["http://a"], "options": {"seed": 1}}, "engine.options is for vLLM in this process"),
        ({"handover": "nccl"}, "handover=nccl does not go without servers; take handover=ipc, or disk"),
        ({"servers": ["http://a"], "handover": "ipc"}, "handover=ipc does not go with servers"),
        ({"handover": "ram"}, "engine.handover"),
        ({"options": {"weight_transfer_config": {}}}, "options cannot set weight_transfer_config"),
        ({"server": "http://a"}, "Did you mean 'engine.servers'"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    """In one line that names the setting."""
    with pytest.raises(ConfigError, match=message):
        build(ENGINES, {"name": "vllm", **settings}, "engine")


@pytest.mark.parametrize(
    ("missing", "settings", "message"),
    [
        ("vllm", {}, r'pip install "perturn\[vllm\]"'),
        ("openai", {"servers": ["http://a"]}, r'pip install "perturn\[api\]"'),
        (
            "vllm",
            {"servers": ["http://a"], "handover": "nccl"},
            r"handover=nccl needs vllm.*leave engine.handover",
        ),
    ],
)
def test_a_missing_library_is_named(monkeypatch, missing, settings, message):
    """Before anything starts."""
    monkeypatch.setattr("perturn.table.find_spec", lambda name: None if name == missing else True)

    with pytest.raises(ConfigError, match=message):
        check_vllm(VllmSettings(**settings))


@pytest.mark.parametrize(("handover", "servers"), [("ipc", []), ("nccl", ["http://a"])])
def test_weights_are_sent_between_gpus_only_where_there_is_one(monkeypatch, handover, servers):
    """Said before anything starts."""
    settings = VllmSettings(handover=handover, servers=servers)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_transfer(settings)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    check_transfer(VllmSettings(servers=servers))
    with pytest.raises(
        ConfigError, match=f"engine.handover={handover} sends weights from GPU to GPU, and this"
    ):
        check_transfer(settings)
