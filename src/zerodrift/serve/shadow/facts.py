"""What does the engine say of its logprobs and its adapters? Asked beside the requests that pass. Torch-free."""

from typing import Any

from zerodrift.backends import vllm_facts
from zerodrift.backends.http import HttpClient
from zerodrift.backends.samples import parse
from zerodrift.core.errors import BadAnswer
from zerodrift.serve.shadow.samples import UpstreamFacts

INFO, MODELS = "/server_info?config_format=json", "/v1/models"


def facts_of(http: HttpClient) -> UpstreamFacts:
    """As they are now; without dev mode the kind of its logprobs is not told."""
    try:
        info = parse(http.find(INFO), vllm_facts.ServerInfo, INFO)
        kind = vllm_facts.logprob_kind(info) if info.logprobs_mode else None
        model = info.vllm_config.get("model_config")
        fills_in = not isinstance(model, dict) or not _is_silent(model)
    except BadAnswer:
        kind, fills_in = None, True
    listed: Any = http.find(MODELS)
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        raise BadAnswer(f"{http.address}{MODELS} lists no models; is this a vLLM server?")
    adapters = frozenset(card["id"] for card in cards if isinstance(card, dict) and card.get("parent"))
    return UpstreamFacts(kind, adapters, fills_in)


def _is_silent(model: dict[str, Any]) -> bool:
    """Under --generation-config vllm a request that says nothing asks for nothing."""
    return model.get("generation_config") == "vllm" and not model.get("override_generation_config")
