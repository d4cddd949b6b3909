"""Is a place that the auditor names the one in the key? By layer, part, and index where the key knows one; never by its size.

What verdict.json has as fields (`layer`, `index`, `rows`, and `head`, `kv_head`, `neuron`, `channels`, `tokens` where there
are any) is taken from there. Parts and quantities are words, and are read with the table below; so is `alike`, and are
rows that were kept as text. Words that are not in the table are no place, and `unread` says so.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

HEAD_DIM = 64
"""Channels of one head of queries, keys or values, in both models of the exam."""
READ = 3
"""A place and two others that it may be: whoever lists every part of a model has located nothing."""
ALIKE = 0.5
"""Runs of channels are the same where more than so much of both together is in both."""

SITES = (
    # The first that matches is the part: from the narrowest to the widest.
    (r"^norms\b|\ball norms\b", "norms"),
    (r"\bsinks?\b", "sink"),
    (r"\bscores\b|\battention logits?\b|\blogits? of (?:the )?attention\b|\bsoftmax\b", "scores"),
    (r"\bq[_ ]norm\b|\bquery norm\b|\bnorm of (?:the )?queries\b", "q-norm"),
    (r"\bk[_ ]norm\b|\bkey norm\b|\bnorm of (?:the )?keys\b", "k-norm"),
    (r"\binput_layernorm\b|\binput norm\b|\bnorm before (?:the )?attention\b", "input-norm"),
    (r"\bpost_attention_layernorm\b|\bpost-attention norm\b|\bnorm before (?:the )?MLP\b", "post-attention-norm"),
    (r"\bfinal norm\b|\bmodel\.norm\b", "final-norm"),
    (r"\btensor of embedding and head\b", "tied"),
    (r"\bembed(?:ding|_tokens)", "embedding"),
    (r"\blogits?\b|\blm_head\b|\boutput head\b", "logits"),
    (r"\brotary\b|\brotations?\b|\bpositions\b|\bposition offsets?\b|\brope\b", "rope"),
    (r"\bresidual around\b", "residual-around"),
    (r"\bresidual stream (?:that goes |that comes )?(?:into|entering)\b", "residual-in"),
    (r"\bresidual\b", "residual"),
    (r"\bkeys and values\b", "kv"),
    (r"\bquer(?:y|ies)\b|\bq_proj\b", "q"),
    (r"\bkeys?\b|\bk_proj\b", "k"),
    (r"\bvalues?\b|\bv_proj\b", "v"),
    (r"\bactivations?\b|\bact_fn\b", "act"),
    (r"\bgate and up\b|\bgate_up\w*", "gate-up"),
    (r"\bgate(?:_proj)?\b", "gate"),
    (r"\bup(?:_proj)?\b", "up"),
    (r"\bdown(?:_proj)?\b", "down"),
    (r"\bo_proj\b|\boutput projection\b", "o"),
    (r"\bMLP\b|\bmlp\b|\bneurons?\b", "mlp"),
    (r"\battention\b|\bself_attn\b", "attention"),
    (r"\ball of it\b|\bwhole layer\b", "layer"),
)
TRUE_SITES = {
    # What the key calls a part, and what it may be called beside it because it is the same.
    "attention": {"attention", "o"},
    "attention-scale": {"scores"},
    "attention-scores": {"scores"},
    "attention-mask": {"mask"},
    "q": {"q"},
    "k": {"k"},
    "v": {"v"},
    "kv": {"k", "v", "kv"},
    "kv-heads": {"k", "v", "kv"},
    "q_norm": {"q-norm"},
    "k_norm": {"k-norm"},
    "input-norm": {"input-norm"},
    "post-attention-norm": {"post-attention-norm"},
    "final-norm": {"final-norm"},
    "mlp": {"mlp", "down"},
    "mlp.down_proj": {"down", "mlp"},
    "mlp.gate_up": {"gate", "up", "gate-up"},
    "mlp.gate/up": {"gate", "up", "gate-up"},
    "mlp.act": {"act", "mlp"},
    "attention,mlp outputs": {"attention", "mlp"},
    "linear weights": {"linears"},
    "layer": {"layer"},
    "residual-in": {"residual-in"},
    "rope": {"rope"},
    "logits": {"logits"},
    "lm_head": {"logits"},
    "embedding": {"embedding"},
}
SCALED = {
    # The same function where all that is wrong is a factor, and a factor is what is said.
    "attention-scale": {"q", "k", "q-norm", "k-norm"},
    "q": {"scores"},
    "v": {"attention"},
    "q_norm": {"scores", "q"},
    "k_norm": {"scores", "k"},
    "residual-in": {"attention", "mlp"},
}
FACTORS = ("output", "scale", "gain", "scale of scores")
IN_LAYERS = {
    *("sink", "scores", "q-norm", "k-norm", "input-norm", "post-attention-norm", "residual-around", "residual-in", "residual"),
    *("kv", "q", "k", "v", "act", "gate-up", "gate", "up", "down", "o", "mlp", "attention", "layer"),
}
KIND = {"head": "heads", "heads": "heads", "KV head": "kv_heads", "KV heads": "kv_heads"}
KIND |= {"neuron": "neurons", "neurons": "neurons", "channel": "channels", "channels": "channels"}
KIND |= {"token": "tokens", "tokens": "tokens", "id": "tokens", "ids": "tokens", "row": "rows", "rows": "rows"}
_NUMBERS = r"\d+(?:(?:\s*[–-]\s*|, | and | to )\d+)*"
_INDEXED = re.compile(rf"\b(KV heads?|heads?|neurons?|channels?|tokens?|ids?|rows?) ({_NUMBERS})(?![\d.])")


class Said(NamedTuple):
    """One place in the words of this file."""

    layer: int | None
    site: str | None
    """None where the words are not known."""
    quantity: str
    """The text that ends in it."""
    heads: frozenset[int] = frozenset()
    kv_heads: frozenset[int] = frozenset()
    neurons: frozenset[int] = frozenset()
    channels: frozenset[int] = frozenset()
    tokens: frozenset[int] = frozenset()


def words(place: Mapping[str, Any]) -> str:
    """`layer 1, attention head 3 output`, as the auditor writes those that it cannot tell apart."""
    layer = "" if place.get("layer") is None else f"layer {place['layer']}, "
    rows = place.get("rows")
    first = "" if not rows else f"rows {rows[0]}–{rows[1] - 1} of "
    index = "" if place.get("index") is None else f" {place['index']}"
    return f"{layer}{first}{place['part']}{index} {place['quantity']}"


def said(place: Mapping[str, Any]) -> list[Said]:
    """What one place of the auditor says, and then what it says that it may be, from its fields and its words."""
    own = _read(words(place))
    units = re.findall(r"KV head|head|neuron|channel|token", place["part"])
    if units and place.get("index") is not None and not getattr(own, KIND[units[-1]]):
        own = own._replace(**{KIND[units[-1]]: frozenset([place["index"]])})  # "channel of the MLP", 5
    typed = {
        "heads": _several(place.get("head")),
        "kv_heads": _several(place.get("kv_head")),
        "neurons": _several(place.get("neuron")),
        "channels": _several(place.get("channel")) or _run(place.get("channels")),
        "tokens": _several(place.get("token")) or _several(place.get("tokens")),
    }
    own = own._replace(**{kind: numbers for kind, numbers in typed.items() if numbers})
    others = filter(None, str(place.get("alike") or "").split(" or "))
    return [own, *map(_read, others)][:READ]


def said_in_text(message: str) -> list[Said]:
    """The same of a row that was kept as text: `layer 2, k norm eps 0.02 (or layer 2, keys offset), R² 1.00`."""
    found = re.fullmatch(r"(.*?) -?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf)(?: \(or (.*)\))?, R² -?[\d.]+", message)
    if found is None:
        return [Said(None, None, message)]
    place, alike = found.groups()
    return [_read(each) for each in (place, *filter(None, (alike or "").split(" or ")))][:READ]


def _read(text: str) -> Said:
    layer, rest = re.fullmatch(r"(?:layer (\d+), )?(.*)", text, re.DOTALL).groups()
    numbers: dict[str, frozenset[int]] = {}
    for kind, listed in _INDEXED.findall(rest):
        numbers[KIND[kind]] = numbers.get(KIND[kind], frozenset()) | frozenset(_listed(listed))
    site = next((name for pattern, name in SITES if re.search(pattern, rest)), None)
    # Rows of an embedding or a head are tokens; those of any other tensor are what comes out of it.
    if rows := numbers.pop("rows", None):
        kind = "tokens" if site in ("embedding", "logits", "tied") else "channels"
        numbers[kind] = numbers.get(kind, frozenset()) | rows
    return Said(None if layer is None else int(layer), site, rest, **numbers)


def _listed(text: str) -> Iterator[int]:
    for part in re.split(r", | and ", text):
        ends = [int(each) for each in re.findall(r"\d+", part)]
        yield from range(ends[0], ends[-1] + 1)


def _several(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _run(value: Any) -> frozenset[int]:
    """As `rows` are: the first, and the one behind the last."""
    return frozenset() if not value else frozenset(range(value[0], value[1]))


def unread(places: Sequence[Sequence[Said]]) -> list[str]:
    """Words that this file does not know: whether they are true is for whoever marks to say."""
    return [own.quantity for own, *_ in places if own.site is None]


def judge(truth: Mapping[str, Any], places: Sequence[Sequence[Said]]) -> str:
    """True where every place that is blamed is the key's, or says that it may be; none where no place is."""
    if not places:
        return "none"
    fitting = [next((each for each in alternatives if _fits(truth, each)), None) for alternatives in places]
    if any(each is None for each in fitting):
        return "false"
    run = frozenset().union(*(_channels(truth, each) for each in fitting if each is not None))
    return "true" if _is_run(truth, run) else "false"


def _fits(truth: Mapping[str, Any], one: Said) -> bool:
    """In all but the run of channels, which several places may share."""
    if not _is_layer(truth, one) or one.site not in _sites(truth, one) or _is_narrower(truth, one):
        return False
    for kind, numbers in (("head", _heads(one)), ("kv_head", _kv_heads(one)), ("neuron", _neurons(one))):
        if kind in truth and numbers != {truth[kind]}:
            return False
    tokens = _tokens(truth)
    return not tokens or (bool(one.tokens) and one.tokens <= tokens)


def _is_narrower(truth: Mapping[str, Any], one: Said) -> bool:
    """One neuron is not the place where all of an MLP is wrong."""
    channels = one.channels
    if one.site == "up" and "neuron" in truth:
        channels = frozenset()
    elif one.site in ("q", "k", "v", "kv") and not one.heads | one.kv_heads and _whole_heads(channels):
        channels = frozenset()
    named = {
        "head": one.heads if "kv_head" not in truth and truth["part"] != "kv-heads" else (),
        "kv_head": one.kv_heads,
        "neuron": one.neurons,
        "channel": channels if "channels" not in truth else (),
        "tokens": one.tokens,
    }
    return any(numbers and kind not in truth for kind, numbers in named.items())


def _is_layer(truth: Mapping[str, Any], one: Said) -> bool:
    wanted = truth.get("layer")
    if wanted == "all":
        return one.layer is None and one.site in IN_LAYERS | {"rope", "norms"}
    return one.layer == wanted


def _sites(truth: Mapping[str, Any], one: Said) -> set[str]:
    part = str(truth.get("part", ""))
    sites = set(TRUE_SITES.get(part, ()))
    whole = part == "q" or not truth.keys() & {"head", "kv_head", "channel", "channels"}
    factor = "factor" in truth or part == "attention-scale"
    if factor and whole and one.quantity.endswith(FACTORS):
        sites |= SCALED.get(part, set())
    if part == "mlp" and "neuron" in truth:
        sites.add("up")
    return sites | {"sink"} if "sink" in truth else sites


def _heads(one: Said) -> frozenset[int]:
    """A run of channels of queries may be a whole head."""
    return one.heads or (_whole_heads(one.channels) if one.site == "q" else frozenset())


def _kv_heads(one: Said) -> frozenset[int]:
    """Of what is stored a head is a KV head, and so is a run of its channels counted from the first head's."""
    if one.site not in ("k", "v", "kv"):
        return one.kv_heads
    return one.kv_heads or one.heads or frozenset(channel // HEAD_DIM for channel in one.channels)


def _whole_heads(channels: frozenset[int]) -> frozenset[int]:
    heads = frozenset(channel // HEAD_DIM for channel in channels)
    return heads if len(channels) == HEAD_DIM * len(heads) else frozenset()


def _neurons(one: Said) -> frozenset[int]:
    """What comes out of the up projection in a channel goes into the neuron of that number."""
    return one.neurons or (one.channels if one.site == "up" else frozenset())


def _tokens(truth: Mapping[str, Any]) -> set[int]:
    """Two that rise are the first and the last; others are a list, or a range that says how it goes on."""
    tokens = truth.get("tokens", ())
    if isinstance(tokens, str):
        return set(range(*map(int, re.findall(r"\d+", tokens))))
    return _from_to(tokens) if len(tokens) == 2 and tokens[0] < tokens[1] else set(tokens)


def _from_to(ends: Iterable[int]) -> set[int]:
    first, last = ends
    return set(range(first, last + 1))


def _channels(truth: Mapping[str, Any], one: Said) -> frozenset[int]:
    """Within the head, where the key counts them so and the auditor from the first head's."""
    if "kv_head" in truth and not one.heads and not one.kv_heads:
        return frozenset(channel % HEAD_DIM for channel in one.channels)
    return one.channels


def _is_run(truth: Mapping[str, Any], run: frozenset[int]) -> bool:
    true = {truth["channel"]} if "channel" in truth else _from_to(truth["channels"]) if "channels" in truth else set()
    return not true or len(run & true) > ALIKE * len(run | true)
